"""Messages over a Unix socket between processes of one user: sent by a thread, taken as they come.

A frame is its length, 8 bytes, and a pickle. Both ends ask the system who is at the other, and talk
to their own user only, so what is unpickled was made by somebody who could do anything here anyway.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, cast

from kvferry.errors import ConfigError, RankError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.sharing.messages import Message

__all__ = ["Channel", "address_of", "framed", "is_gone", "open_process", "process_at"]

_LENGTH = struct.Struct("<Q")
# Far more than the indices of any load take. What is longer was not sent by this code.
_MAX_FRAME_BYTES = 1 << 32
_RECEIVE_BYTES = 1 << 20
# Loads of some hundred long prompts. Whoever leaves so much unread does not read.
_MAX_UNSENT_BYTES = 64 << 20
# For a thread whose socket was shut down, and which has nothing more to wait for.
_END_SECS = 10.0
_CREDENTIALS = struct.Struct("3i")
_MAX_NAME_BYTES = 64
# What pickle says of something that another version made, or nobody did.
_NOT_OURS = (
    pickle.UnpicklingError,
    AttributeError,
    ImportError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
)
# What a message brings along: one descriptor for each kind of slot there may ever be.
_MAX_FDS = 8


def address_of(name: str) -> str:
    """The abstract socket address of a shared host copy.

    Such an address is nobody's file: it is free again when its process is gone, however that ends.
    Raises ConfigError for a name that is none.
    """
    if not name or "\0" in name or len(name.encode()) > _MAX_NAME_BYTES:
        raise ConfigError(
            f"name={name!r} of a shared host copy: give 1 to {_MAX_NAME_BYTES} bytes of text, the "
            f"same on every rank of the machine"
        )
    return f"\0kvferry:{os.getuid()}:{name}"


def process_at(connection: socket.socket) -> int:
    """The id of the process at the other end, as the system knows it.

    Raises RankError where that is another user's, or one that cannot be seen from here.
    """
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int
    pid, uid, _ = _CREDENTIALS.unpack(told)
    if uid != os.getuid():
        raise RankError(f"process {pid} is user {uid}'s, and this one user {os.getuid()}'s")
    if pid <= 0:
        raise RankError(
            "a process that cannot be seen from here: ranks that share a host copy must be in one "
            "process namespace"
        )
    return pid


def open_process(pid: int) -> int:
    """A descriptor that is readable when the process is gone. Raises RankError if it is already."""
    try:
        return os.pidfd_open(pid)
    except OSError as bad:
        raise RankError(
            f"process {pid} cannot be watched ({bad.strerror}): is it alive, and is this Linux 5.3 "
            f"or newer?"
        ) from bad


def is_gone(process: int) -> bool:
    """Whether the process of a descriptor from `open_process` has ended."""
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    return bool(waiting.poll(0))


class Channel:
    """A connected socket that carries messages. `send` never waits, nor does `receive`.

    A process that is slow to read keeps one thread here waiting, and nobody else; of one that does
    not read at all, a bounded number of bytes is kept. The socket is the channel's, and is closed
    with it. One thread uses it.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)  # for the thread that sends; receiving never blocks
        self._socket = connection
        self._received = bytearray()
        self._ended = False
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._unsent_bytes = 0
        self._unsent_lock = threading.Lock()
        self._sender: threading.Thread | None = None
        self._closed = False

    @property
    def ended(self) -> bool:
        """Whether either end is closed, or gone."""
        return self._ended or self._closed

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._closed

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> bool:
        """Have a message of `framed` sent, behind those before it.

        False: it is not sent, as the other end has left too much unread. If that end is gone, or
        this one closed, nobody gets it.
        """
        if self._closed:
            return True
        with self._unsent_lock:
            unsent = self._unsent_bytes + len(frame)
            if self._unsent_bytes and unsent > _MAX_UNSENT_BYTES:  # one alone may be as long
                return False
            self._unsent_bytes = unsent
        if self._sender is None:
            self._sender = threading.Thread(
                target=self._send_all, name="kvferry-share", daemon=True
            )
            self._sender.start()
        self._outgoing.put(frame)
        return True

    def send_first(self, message: Message, fds: Sequence[int]) -> None:
        """Send a short message with descriptors, before any other.

        Raises OSError where it does not go out whole, at once.
        """
        frame = framed(message)
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        if socket.send_fds(self._socket, [frame], list(fds), flags) != len(frame):
            raise BrokenPipeError("a first message was cut")

    def receive_first(self, timeout: float) -> tuple[Message, list[int]]:
        """Wait for one message and the descriptors that come with it, which are the caller's.

        Raises TimeoutError, and ConnectionError where the other end closed.
        """
        self._socket.settimeout(timeout)
        fds: list[int] = []
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, _LENGTH.size, _MAX_FDS)
            while len(head) < _LENGTH.size:
                head += self._some(_LENGTH.size - len(head))
            (length,) = _LENGTH.unpack(head)
            body = b""
            while len(body) < length:
                body += self._some(min(length - len(body), _RECEIVE_BYTES))
            return _unpickled(body), list(fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        finally:
            self._socket.settimeout(None)

    def _some(self, most: int) -> bytes:
        got = self._socket.recv(most)
        if not got:
            raise ConnectionResetError("the other end closed the connection")
        return got

    def receive(self) -> list[Message]:
        """The messages that are here by now. Those of an end that is gone come all the same."""
        while not self._ended and not self._closed:
            try:
                got = self._socket.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                got = b""
            self._ended = not got
            self._received += got
        messages = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > _MAX_FRAME_BYTES:
                raise RankError(f"a message of {length} bytes: the other end is no kvferry's")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(_unpickled(bytes(self._received[_LENGTH.size : end])))
            del self._received[:end]
        return messages

    def wait(self, timeout: float) -> None:
        """Block until there may be something to receive, at most `timeout` seconds."""
        if self._ended or self._closed:
            return
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        waiting.poll(max(0.0, timeout) * 1000)

    def close(self, timeout: float = 0.0) -> None:
        """Close this end, once what was to be sent is sent, or after `timeout` seconds."""
        if self._closed:
            return
        self._closed = True
        if self._sender is not None:
            self._outgoing.put(None)
            self._sender.join(timeout)
        with contextlib.suppress(OSError):  # the other end may be gone; a sender that waits ends
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._sender is not None:
            self._sender.join(_END_SECS)
        self._socket.close()

    def _send_all(self) -> None:
        while (frame := self._outgoing.get()) is not None:
            try:
                self._socket.sendall(frame, socket.MSG_NOSIGNAL)
            except OSError:  # gone: `receive` finds the same, and tells
                return
            with self._unsent_lock:
                self._unsent_bytes -= len(frame)


def framed(message: Message) -> bytes:
    """A message as it travels."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def _unpickled(body: bytes) -> Message:
    try:
        return cast("Message", pickle.loads(body))  # noqa: S301  see the head of this file
    except _NOT_OURS as bad:
        raise RankError(
            f"a message that cannot be read ({type(bad).__name__}: {bad}): run one version of "
            f"kvferry on all ranks"
        ) from bad

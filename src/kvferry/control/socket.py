"""The listening end: a thread that talks to clients, and orders that wait to be carried out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.closing import ClosedAtExit
from kvferry.control.messages import MAX_LINE_BYTES, Answer, Order
from kvferry.control.paths import bound_socket, remove_own
from kvferry.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ControlSocket", "PendingOrder"]

_READ_SECS = 5.0
_SEND_SECS = 5.0
_CLOSE_SECS = 10.0
_GRACE_SECS = 1.0
_MOST_WAITING = 16
_TURNS = 5
"""Of the loop, from a connection to its task."""

_CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid of a peer; unix(7), SO_PEERCRED."""


class PendingOrder:
    """An order that a client waits for."""

    def __init__(self, order: Order, loop: asyncio.AbstractEventLoop) -> None:
        self.order = order
        self.deadline = time.monotonic() + order.timeout
        self._loop = loop
        self._answered: asyncio.Future[Answer] = loop.create_future()

    @property
    def seconds_left(self) -> float:
        """0 where its time is over: the client has been told so, or will be."""
        return max(0.0, self.deadline - time.monotonic())

    def answer(self, answer: Answer) -> None:
        """Tell the client, from any thread; of several answers it gets the first."""
        with contextlib.suppress(RuntimeError):  # the loop was closed, and the client with it
            self._loop.call_soon_threadsafe(self._take, answer)

    def _take(self, answer: Answer) -> None:
        if not self._answered.done():
            self._answered.set_result(answer)

    async def answered(self) -> Answer:
        """What is answered, or that nothing was in time."""
        # What was begun in time comes to an end by the deadline, and is told a little later.
        left = max(0.0, self.deadline - time.monotonic()) + _GRACE_SECS
        try:
            return await asyncio.wait_for(asyncio.shield(self._answered), left)
        except TimeoutError:
            return Answer(
                ok=False,
                error=f"not done in {self.order.timeout:g} s: the process carries out orders when "
                f"it polls its cache; it may be busy, or idle without polling",
            )


class ControlSocket(ClosedAtExit):
    """Listens at a path, with permissions for its owner alone, until it is closed.

    Orders are carried out by whoever calls `take` and answers what it gives. A client that is slow,
    hangs or sends something else keeps nobody waiting.

    Args:
        path: Of the socket; 107 bytes at most.
        wake: Is called when an order came, by another thread: `take` has something.

    Raises ControlError where none can be made, see `bound_socket`.
    """

    def __init__(self, path: str | os.PathLike[str], *, wake: Callable[[], object]) -> None:
        self._listener = bound_socket(path)
        self.path = os.fspath(path)
        self._inode = Path(self.path).lstat().st_ino
        self._pid = os.getpid()
        self._wake = wake
        self._waiting: deque[PendingOrder] = deque()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._reading: set[asyncio.Task[Any] | None] = set()
        self._thread = threading.Thread(target=self._serve, name="kvferry-control", daemon=True)
        self._thread.start()

    @property
    def has_orders(self) -> bool:
        """Whether `take` has something."""
        return bool(self._waiting)

    def take(self) -> PendingOrder | None:
        """The oldest order that nobody took."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """Listen no more, tell who waits, and remove the socket; again does nothing."""
        if os.getpid() != self._pid:  # a fork has neither the thread nor the path
            self._listener.close()
            return
        if self._loop.is_closed():
            return
        while (one := self.take()) is not None:
            one.answer(Answer(ok=False, error="the cache was closed"))
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_SECS)
        remove_own(self.path, self._inode)

    # ---------------------------------------------------------------- the thread

    def _serve(self) -> None:
        with self._listener, contextlib.closing(self._loop):
            self._loop.run_until_complete(self._accept())

    async def _accept(self) -> None:
        talks: set[asyncio.Task[None]] = set()

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(self._talk(reader, writer))
            talks.add(task)
            task.add_done_callback(talks.discard)

        server = await asyncio.start_unix_server(begin, sock=self._listener, limit=MAX_LINE_BYTES)
        await self._stop.wait()
        # Nobody more is taken in; who just was has a task before the server is closed, which would
        # lose the connection otherwise.
        self._loop.remove_reader(self._listener)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        server.close()
        for task in list(self._reading):  # they may never say anything
            if task is not None:
                task.cancel()
        if left := set(talks):  # answers that are ready go out
            _, late = await asyncio.wait(left, timeout=_SEND_SECS)
            for task in late:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):  # it went away, or takes no answer
            try:
                answer = await self._answer(reader, writer)
                try:
                    line = answer.line()
                except ControlError as too_long:
                    line = Answer(ok=False, error=str(too_long)).line()
                writer.write(line)
                await asyncio.wait_for(writer.drain(), _SEND_SECS)
            finally:
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), _SEND_SECS)

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        task = asyncio.current_task()
        self._reading.add(task)
        try:
            return await asyncio.wait_for(reader.readline(), _READ_SECS)
        finally:
            self._reading.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
        try:
            line = await self._line(reader)
            # Behind the line: who is refused before it was read hears nothing of why.
            if (user := _user_of(writer)) not in (0, os.geteuid()):
                return Answer(ok=False, error=f"user {user} may give no orders here")
            order = Order.parse(line)
        except ValueError:  # what asyncio raises for a line beyond the limit
            return Answer(ok=False, error=f"a line of more than {MAX_LINE_BYTES:,} bytes")
        except TimeoutError:
            return Answer(ok=False, error=f"no line came in {_READ_SECS:g} s")
        except ControlError as bad:
            return Answer(ok=False, error=str(bad))
        if len(self._waiting) >= _MOST_WAITING:
            return Answer(ok=False, error=f"{_MOST_WAITING} orders wait already; ask later")
        pending = PendingOrder(order, self._loop)
        self._waiting.append(pending)
        self._wake()
        return await pending.answered()


def _user_of(writer: asyncio.StreamWriter) -> int:
    connection = writer.get_extra_info("socket")
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(told)[1]
    return user

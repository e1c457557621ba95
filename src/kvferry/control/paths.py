"""Where a control socket lies: at a path of its own, taken over from a process that died."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvferry.errors import ControlError

__all__ = ["bound_socket", "checked_path", "remove_own"]

_MAX_PATH_BYTES = 107
"""Of a socket's name in Linux, without the zero behind it; unix(7)."""

_BACKLOG = 16
_LOOK_SECS = 1.0
_LOCK_SECS, _LOCK_TURN_SECS = 5.0, 0.01


def checked_path(path: str | os.PathLike[str]) -> str:
    """`path` as text. Raises ControlError for one that no socket can have."""
    where = os.fspath(path)
    if not where or "\0" in where:
        raise ControlError(f"control socket {where!r}: give the path of a file")
    if (size := len(os.fsencode(where))) > _MAX_PATH_BYTES:
        raise ControlError(
            f"control socket {where!r}: {size} bytes, and a socket's path has at most "
            f"{_MAX_PATH_BYTES}; give a shorter one"
        )
    return where


def bound_socket(path: str | os.PathLike[str]) -> socket.socket:
    """A socket that listens at `path`, which only its owner may connect to.

    What a dead process left there is replaced. Raises ControlError where another process listens,
    where something else lies, and where none can be made.
    """
    where = checked_path(path)
    try:
        with _folder_alone(Path(where).absolute().parent):
            _clear(where)
            return _listening(where)
    except OSError as bad:
        raise ControlError(
            f"no control socket can be made at {where}: {bad.strerror}; give a path in a folder "
            f"that this process may write to"
        ) from bad


def remove_own(path: str, inode: int) -> None:
    """Remove the socket at `path` if it is still this one."""
    with contextlib.suppress(OSError, ControlError), _folder_alone(Path(path).absolute().parent):
        if Path(path).lstat().st_ino == inode:
            Path(path).unlink()


@contextlib.contextmanager
def _folder_alone(folder: Path) -> Iterator[None]:
    """Nobody else looks, removes and binds in `folder` meanwhile; the lock ends with its holder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + _LOCK_SECS
    never = threading.Event()
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ControlError(
                        f"{folder} was locked by another process for {_LOCK_SECS:g} s; give the "
                        f"control socket a folder of its own"
                    ) from None
                never.wait(_LOCK_TURN_SECS)  # a lock cannot be waited for with a deadline
        yield
    finally:
        os.close(handle)


def _clear(where: str) -> None:
    try:
        mode = Path(where).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ControlError(
            f"control socket {where}: something else lies there; remove it, or give another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.settimeout(_LOOK_SECS)
        try:
            other.connect(where)
        except ConnectionRefusedError:
            Path(where).unlink()  # its process is gone
        except OSError as bad:
            if bad.errno in (errno.EACCES, errno.EPERM):
                raise ControlError(
                    f"control socket {where} is another user's; give another path"
                ) from bad
            raise ControlError(
                f"a process listens at {where} and takes no connection; give another path"
            ) from bad
        else:
            raise ControlError(
                f"another process, or another cache of this one, listens at {where}; give each "
                f"cache a path of its own"
            )


def _listening(where: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.ExitStack() as unless_made:
        unless_made.callback(listener.close)
        listener.bind(where)
        # Until it listens nobody can connect, so there is no moment in which others might.
        Path(where).chmod(stat.S_IRUSR | stat.S_IWUSR)
        listener.listen(_BACKLOG)
        unless_made.pop_all()
    return listener

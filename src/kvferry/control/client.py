"""The other end: one order, one answer."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from kvferry.control.messages import MAX_LINE_BYTES, Answer, Order
from kvferry.control.paths import checked_path
from kvferry.errors import ControlError

if TYPE_CHECKING:
    import os

__all__ = ["ask"]

# The process gives its answer a little after the deadline; this is for that and the way.
_WAY_SECS = 5.0


def ask(path: str | os.PathLike[str], order: Order) -> Answer:
    """Give an order to the process that listens at `path`, and wait for its answer.

    Raises:
        ControlError: Nobody listens there, it is another user's, or what came back is no answer,
            or nothing did in the order's time and a little more.
    """
    where = checked_path(path)
    line = order.line()
    deadline = time.monotonic() + order.timeout + _WAY_SECS
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_WAY_SECS)
        try:
            connection.connect(where)
            connection.sendall(line)
            return Answer.parse(_read_line(connection, deadline))
        except FileNotFoundError:
            raise ControlError(
                f"nothing is at {where}: start the process with control.socket set to it, or give "
                f"the right path"
            ) from None
        except ConnectionRefusedError:
            raise ControlError(f"nobody listens at {where}: the process that did is gone") from None
        except PermissionError:
            raise ControlError(f"{where} is another user's; ask as its owner") from None
        except TimeoutError:
            raise ControlError(f"the process at {where} did not answer in time") from None
        except OSError as bad:
            raise ControlError(f"{where}: {bad}") from bad


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    got = bytearray()
    while not got.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        if not (piece := connection.recv(4096)):
            raise ControlError("the process went away, or refused to listen, before it answered")
        got += piece
        if len(got) > MAX_LINE_BYTES:
            raise ControlError(f"an answer of more than {MAX_LINE_BYTES:,} bytes")
    return bytes(got)

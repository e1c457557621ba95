"""Giving back many things of which the driver may keep some."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Protocol

__all__ = ["Closes", "close_all"]


class Closes(Protocol):
    """What gives something back; a second time it gives back nothing."""

    def close(self) -> None:
        """Give it back. Raises DriverError where the driver refuses."""


def close_all(things: Iterable[Closes]) -> None:
    """Close every one of `things`, in their order, also where one of them cannot be.

    Raises what the last that could not be closed raised; the others are its context.
    """
    with contextlib.ExitStack() as stack:
        for one in reversed(list(things)):
            stack.callback(one.close)

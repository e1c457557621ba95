"""What takes a while, step by step: whoever calls it waits for it, or looks in when it polls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

__all__ = ["Steps", "drive"]

_R = TypeVar("_R")

Steps: TypeAlias = Generator[None, None, _R]
"""Yields whenever there is nothing to do but to wait; what is closed before its end gives up."""


def drive(steps: Steps[_R], pause: Callable[[], object]) -> _R:
    """Go through all `steps`, with a `pause` between them; what they return."""
    with contextlib.closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: _R = end.value
                return result
            pause()

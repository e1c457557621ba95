"""What a file system says that is no failure yet."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["passing_einval", "past_stale"]

_R = TypeVar("_R")


@contextlib.contextmanager
def passing_einval() -> Iterator[None]:
    """Go on behind the block where the system says that it cannot do this."""
    try:
        yield
    except OSError as bad:
        if bad.errno != errno.EINVAL:
            raise


def past_stale(call: Callable[[], _R]) -> _R:
    """`call`, and again where the file was replaced or removed on another host as it was looked at.

    Over a network a name is looked up in what this host remembers of the folder (ESTALE, see
    open(2)); the second time it asks. What is stale then too is gone: FileNotFoundError.
    """
    try:
        return call()
    except OSError as bad:
        if bad.errno != errno.ESTALE:
            raise
    try:
        return call()
    except OSError as bad:
        if bad.errno != errno.ESTALE:
            raise
        raise FileNotFoundError(
            errno.ENOENT, f"gone on another host: {os.strerror(errno.ESTALE)}"
        ) from bad

"""The end of a `with` block, for everything that has a `close`."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ClosedAtExit"]


class ClosedAtExit(abc.ABC):
    """A context manager that closes itself."""

    @abc.abstractmethod
    def close(self) -> object:
        """End it, and give back what it has."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

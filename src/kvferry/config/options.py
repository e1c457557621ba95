"""Options of a storage backend: names and plain values that kvferry hands on unread."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["SECRET", "OptionValue", "Options"]

OptionValue = str | int | float | bool

SECRET = "(not shown)"
"""What is shown in place of a value that may be a secret."""

_SECRET_NAME = re.compile(r"secret|passw|token|credential|key", re.IGNORECASE)


class Options(Mapping[str, OptionValue]):
    """A mapping that cannot be changed. Its `repr` does not tell what may be a secret."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, OptionValue] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, name: str) -> OptionValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Options, (self._values,))

    def shown(self) -> dict[str, OptionValue]:
        """The same for people: values of options that are named like secrets are left out."""
        return {
            name: SECRET if _SECRET_NAME.search(name) else value
            for name, value in self._values.items()
        }

    def __repr__(self) -> str:
        return f"Options({self.shown()!r})"

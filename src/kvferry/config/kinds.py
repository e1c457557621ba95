"""Kinds of values that settings have: what is allowed, in words, and how each source writes it.

A kind raises ValueError for what it does not accept; who asks adds source, value and what is
allowed. TOML and programs have types, so only an environment variable's text is read as a number
or a switch.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import operator
import pathlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from kvferry.config.options import Options
from kvferry.errors import ConfigError
from kvferry.sizes import bytes_of

__all__ = [
    "NONE",
    "AbsolutePath",
    "Backend",
    "Count",
    "Kind",
    "Number",
    "OptionMapping",
    "OrNone",
    "Size",
    "StorageAt",
    "Switch",
    "Word",
    "size_of",
]

NONE = "none"
"""How the environment and TOML, which have no None, write it."""

MAX_BYTES = 1 << 60

_N = TypeVar("_N", int, float)

_INTEGER = re.compile(r"[+-]?\d+(_\d+)*", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_BACKEND = re.compile(r"[a-z][a-z0-9_]*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


class Kind(abc.ABC):
    """What values a setting takes."""

    is_secret = False
    """Whether a value of it may hold secrets, and is not to be shown in a message."""

    @property
    @abc.abstractmethod
    def allowed(self) -> str:
        """What is accepted, to follow "must be"."""

    @abc.abstractmethod
    def check(self, value: Any) -> Any:
        """`value` in the one form that the config keeps; ValueError where it is not accepted."""

    def read(self, text: str) -> Any:
        """What `text` of an environment variable stands for, to be checked then."""
        return text


@dataclasses.dataclass(frozen=True)
class Switch(Kind):
    """On or off."""

    allowed = "true or false"

    def check(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    def read(self, text: str) -> Any:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)


@dataclasses.dataclass(frozen=True)
class Count(Kind):
    """A whole number."""

    minimum: int
    maximum: int = 1 << 31

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.minimum:,} to {self.maximum:,}"

    def check(self, value: Any) -> int:
        return _within(_integer(value), self.minimum, self.maximum)

    def read(self, text: str) -> Any:
        return int(text) if _INTEGER.fullmatch(text) else text


@dataclasses.dataclass(frozen=True)
class Size(Kind):
    """A number of bytes."""

    minimum: int

    @property
    def allowed(self) -> str:
        least = f"{self.minimum:,} or more bytes"
        return f"{least}, as a whole number, or as text such as '8GiB' or '500MB'"

    def check(self, value: Any) -> int:
        if isinstance(value, str):
            value = bytes_of(value)
        return _within(_integer(value), self.minimum, MAX_BYTES)

    def read(self, text: str) -> Any:
        return int(text) if _INTEGER.fullmatch(text) else text


@dataclasses.dataclass(frozen=True)
class Number(Kind):
    """A number with a fraction: a duration in seconds, a share, a ratio."""

    minimum: float
    maximum: float
    unit: str = ""
    above_minimum: bool = False
    below_maximum: bool = False

    @property
    def allowed(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        least = "above" if self.above_minimum else "from"
        most = "below" if self.below_maximum else "to"
        joint = " and" if self.above_minimum or self.below_maximum else ""
        return f"a number {least} {self.minimum:,g}{joint} {most} {self.maximum:,g}{unit}"

    def check(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        number = float(_within(value, self.minimum, self.maximum))
        edge = (self.above_minimum and number == self.minimum) or (
            self.below_maximum and number == self.maximum
        )
        if edge:
            raise ValueError
        return number

    def read(self, text: str) -> Any:
        return float(text) if _NUMBER.fullmatch(text) else text


@dataclasses.dataclass(frozen=True)
class Word(Kind):
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return " or ".join([", ".join(map(repr, self.words[:-1])), repr(self.words[-1])])

    def check(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError
        return self.words[self.words.index(value)]


@dataclasses.dataclass(frozen=True)
class AbsolutePath(Kind):
    """A folder or file. A relative one would be another one in each process."""

    allowed = "an absolute path"

    def check(self, value: Any) -> pathlib.Path:
        if not isinstance(value, str | pathlib.Path) or "\0" in str(value):
            raise ValueError
        path = pathlib.Path(value)
        if not path.is_absolute():
            raise ValueError
        return path


@dataclasses.dataclass(frozen=True)
class Backend(Kind):
    """What carries storage: a name that kvferry has a backend for, or somebody else's class."""

    allowed = "the name of a backend such as 'file', or a class as 'package.module:Class'"

    def check(self, value: Any) -> str:
        if not isinstance(value, str) or value == NONE or not _BACKEND.fullmatch(value):
            raise ValueError
        return str(value)


@dataclasses.dataclass(frozen=True)
class StorageAt(Kind):
    """Where storage is, in one line."""

    allowed = (
        "a URL such as 'file:///var/cache/kv?capacity_bytes=64GiB', or 'package.module:Class?…'"
    )
    is_secret = True

    def check(self, value: Any) -> str:
        # Here, so that a config alone needs no storage.
        from kvferry.storage import is_storage_url, parse_storage_url

        if not isinstance(value, str) or not is_storage_url(value):
            raise ValueError
        try:
            parse_storage_url(value)
        except ConfigError as bad:
            raise ValueError(str(bad)) from bad
        return str(value)


@dataclasses.dataclass(frozen=True)
class OptionMapping(Kind):
    """Names with plain values."""

    is_secret = True
    allowed = (
        "a table of names with text, numbers or truth values; in an environment variable a JSON "
        "object"
    )

    def check(self, value: Any) -> Options:
        if not isinstance(value, Mapping):
            raise ValueError
        for name, one in value.items():
            plain = isinstance(one, str | int | float) and (
                not isinstance(one, float) or math.isfinite(one)
            )
            if not isinstance(name, str) or not name:
                raise ValueError(f"{name!r} is no name")
            if not plain:
                raise ValueError(f"the value of {name!r} is {type(one).__name__} or not finite")
        return Options(value)

    def read(self, text: str) -> Any:
        try:
            return json.loads(text)
        except RecursionError as deep:
            raise ValueError("it is nested too deeply") from deep


@dataclasses.dataclass(frozen=True)
class OrNone(Kind):
    """None, or what another kind accepts."""

    kind: Kind

    @property
    def is_secret(self) -> bool:  # type: ignore[override]
        return self.kind.is_secret

    @property
    def allowed(self) -> str:
        return f"{self.kind.allowed}, or '{NONE}'"

    def check(self, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value == NONE):
            return None
        return self.kind.check(value)

    def read(self, text: str) -> Any:
        return None if text == NONE else self.kind.read(text)


def size_of(what: str, text: str) -> int:
    """The bytes that `text` says, as `8GiB` or a plain number.

    Raises:
        ConfigError: It says none; the message names `what`.
    """
    kind = Size(0)
    try:
        found: int = kind.check(kind.read(text))
    except ValueError as bad:
        raise ConfigError(f"{what} {text!r} must be {kind.allowed}") from bad
    return found


def _integer(value: Any) -> int:
    if isinstance(value, bool | str):
        raise ValueError
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError from None


def _within(value: _N, minimum: float, maximum: float) -> _N:
    # Written so that a NaN, which is neither less nor more, is refused.
    if not minimum <= value <= maximum:
        raise ValueError
    return value

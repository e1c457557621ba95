"""One setting, and the sections that settings are kept in."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from kvferry.config.kinds import Kind
from kvferry.errors import ConfigError

__all__ = ["Section", "Setting", "checked", "nearest", "settings_of", "shown"]

_MAX_SHOWN = 80


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a field of a section accepts and does. It annotates the field."""

    kind: Kind
    meaning: str


class Section:
    """The base of a section: a frozen dataclass whose values are checked however it is made.

    Raises:
        ConfigError: A value is not accepted.
    """

    def __post_init__(self) -> None:
        for name, setting in settings_of(type(self)).items():
            value = checked(f"{type(self).__name__}({name}=...)", "", setting, getattr(self, name))
            object.__setattr__(self, name, value)


def settings_of(section: type[Section]) -> Mapping[str, Setting]:
    """The settings of a section by the names of their fields, in order."""
    if section not in _SETTINGS_OF:
        hints = typing.get_type_hints(section, include_extras=True)
        _SETTINGS_OF[section] = types.MappingProxyType(
            {name: hint.__metadata__[0] for name, hint in hints.items()}
        )
    return _SETTINGS_OF[section]


# Reading annotations takes long, and they do not change.
_SETTINGS_OF: dict[type[Section], Mapping[str, Setting]] = {}


def checked(source: str, name: str, setting: Setting, value: Any) -> Any:
    """`value` as the config keeps it; ConfigError that has source, value and what is allowed."""
    try:
        return setting.kind.check(value)
    except ValueError as why:
        raise refusal(source, name, setting, value, why) from None


def refusal(
    source: str, name: str, setting: Setting, value: Any, why: ValueError | None = None
) -> ConfigError:
    """The error for a `value` from `source` that the setting `name` does not accept."""
    found = "" if setting.kind.is_secret else f" {shown(value)}"
    reason = f" ({why})" if why is not None and str(why) else ""
    error = ConfigError(
        f"{source}:{found} is not accepted{reason}; it must be {setting.kind.allowed}"
    )
    error.settings = (name,) if name else ()
    return error


def shown(value: Any) -> str:
    """`value` for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


def nearest(name: str, known: Collection[str]) -> str:
    """That of `known` which `name` was most likely meant to be."""
    plain = name.casefold().replace("-", "_")
    return difflib.get_close_matches(plain, sorted(known), n=1, cutoff=0)[0]

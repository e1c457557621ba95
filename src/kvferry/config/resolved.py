"""Four sources become one config, and each value keeps its origin."""

from __future__ import annotations

import dataclasses
import enum
import os
import pathlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kvferry.config.setting import Setting, checked, nearest, refusal, settings_of, shown
from kvferry.config.tree import SECTIONS, Config
from kvferry.env import config_file, setting_texts, setting_variable
from kvferry.errors import ConfigError

__all__ = ["PRECEDENCE", "Origin", "OriginKind", "Resolved", "resolve"]


class OriginKind(enum.StrEnum):
    """The kinds of source. An earlier one wins."""

    KEYWORD = "keyword"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


PRECEDENCE = (
    "keyword arguments, then environment variables KVFERRY_<SECTION>_<FIELD>, then the TOML file, "
    "then defaults"
)
"""Which source wins, in words; the order of `OriginKind`."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    kind: OriginKind
    place: str = ""
    """The variable, or the file; empty for defaults and keyword arguments."""

    def __str__(self) -> str:
        return f"{self.kind.value} {self.place}".rstrip()


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A config and its sources."""

    config: Config
    origin_of: Mapping[str, Origin]
    """The origin of each setting, by ``section.field``, in order."""

    file: pathlib.Path | None
    """The TOML file that was read, if any."""


class _Given(NamedTuple):
    """A value that a source gives, checked."""

    value: Any
    origin: Origin


_Key = tuple[str, str]
_KEYS = tuple((section, field) for section, of in SECTIONS.items() for field in settings_of(of))
_NAMES = frozenset(f"{section}.{field}" for section, field in _KEYS)


def resolve(
    path: str | os.PathLike[str] | None,
    environ: Mapping[str, str] | None,
    overrides: Mapping[str, Mapping[str, Any]],
) -> Resolved:
    """See `Config.resolve`."""
    file = config_file(environ) if path is None else pathlib.Path(path)
    # Whatever is wrong with any source is an error, also where another one overrides it.
    sources = [
        _keywords(overrides),
        _environment(environ),
        {} if file is None else _file(file),
    ]
    given: dict[_Key, _Given] = {}
    for source in reversed(sources):
        given.update(source)
    origin_of = {
        f"{section}.{field}": given[section, field].origin
        if (section, field) in given
        else Origin(OriginKind.DEFAULT)
        for section, field in _KEYS
    }
    sections: dict[str, Any] = {
        name: of(**{field: value.value for (at, field), value in given.items() if at == name})
        for name, of in SECTIONS.items()
    }
    try:
        config = Config(**sections)
    except ConfigError as broken:
        told = ", ".join(f"{name} is from {origin_of[name]}" for name in broken.settings)
        error = ConfigError(f"{broken} ({told})")
        error.settings = broken.settings
        raise error from None
    return Resolved(config, origin_of, file)


def _setting(key: _Key) -> Setting:
    section, field = key
    return settings_of(SECTIONS[section])[field]


def _keywords(overrides: Mapping[str, Mapping[str, Any]]) -> dict[_Key, _Given]:
    origin = Origin(OriginKind.KEYWORD)
    return _from_tree(overrides, origin, lambda name: f"keyword argument {name}", "a mapping")


def _file(path: pathlib.Path) -> dict[_Key, _Given]:
    try:
        tree = tomllib.loads(path.read_bytes().decode())
    except (OSError, ValueError) as bad:
        # ValueError: TOML, UTF-8, and paths that no system has.
        why = bad.strerror if isinstance(bad, OSError) else bad
        raise ConfigError(
            f"cannot read the config file {shown(str(path))}: {why}; name a TOML file in UTF-8"
        ) from bad
    origin = Origin(OriginKind.FILE, str(path))
    return _from_tree(tree, origin, lambda name: f"{path}, {name}", "a table")


def _from_tree(
    tree: Mapping[str, Any], origin: Origin, source: Callable[[str], str], container: str
) -> dict[_Key, _Given]:
    """Values of a tree of sections; whatever is wrong with it, one error has all of it."""
    given, complaints = {}, []
    for section, fields in tree.items():
        if section not in SECTIONS:
            complaints.append(_unknown(source, section, ""))
        elif not isinstance(fields, Mapping):
            complaints.append(
                ConfigError(f"{source(section)}: {shown(fields)} must be {container} of settings")
            )
        else:
            for field, value in fields.items():
                name = f"{section}.{field}"
                if name not in _NAMES:
                    complaints.append(_unknown(source, section, field))
                    continue
                try:
                    found = checked(source(name), name, _setting((section, field)), value)
                except ConfigError as refused:
                    complaints.append(refused)
                else:
                    given[section, field] = _Given(found, origin)
    _raise(complaints)
    return given


def _environment(environ: Mapping[str, str] | None) -> dict[_Key, _Given]:
    texts = setting_texts({name: settings_of(of) for name, of in SECTIONS.items()}, environ)
    given, complaints = {}, []
    for key, text in texts.items():
        variable, name, setting = setting_variable(*key), ".".join(key), _setting(key)
        try:
            value = setting.kind.read(text)
        except ValueError as bad:
            complaints.append(refusal(f"environment variable {variable}", name, setting, text, bad))
            continue
        try:
            found = checked(f"environment variable {variable}", name, setting, value)
        except ConfigError as refused:
            complaints.append(refused)
        else:
            given[key] = _Given(found, Origin(OriginKind.ENVIRONMENT, variable))
    _raise(complaints)
    return given


def _unknown(source: Callable[[str], str], section: str, field: str) -> ConfigError:
    if section in SECTIONS:
        name, known = f"{section}.{field}", _NAMES
    else:
        name, known = section, frozenset(SECTIONS)
        # As an environment variable has it, or without its section.
        for near_section, near_field in _KEYS:
            if section in (f"{near_section}_{near_field}", f"{near_section}.{near_field}"):
                known = frozenset({f"{near_section}.{near_field}"})
    return ConfigError(
        f"{source(name)}: there is no such setting; the nearest is {nearest(name, known)}, and "
        f"`kvferry config` lists all"
    )


def _raise(complaints: Iterable[ConfigError]) -> None:
    """One error for all of `complaints`, the same in whichever order they were found."""
    ordered = sorted(complaints, key=str)
    if not ordered:
        return
    error = ConfigError("; ".join(map(str, ordered)))
    error.settings = tuple(name for one in ordered for name in one.settings)
    raise error

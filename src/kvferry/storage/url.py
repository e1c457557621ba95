"""Where storage is, in one line: a URL, or a class, with options behind a question mark.

    file:///var/cache/kv?capacity_bytes=64GiB     mooncake://10.0.0.1:50051?segment_bytes=8GiB
    s3://bucket/prefix?region=eu-central-1        package.module:Class?size=3

docs/storage.md lists the schemes. Options have the names and kinds of the class's own parameters.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import inspect
import re
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvferry.errors import ConfigError
from kvferry.sizes import bytes_of

__all__ = ["ENTRY_POINTS", "StorageUrl", "is_storage_url", "parse_storage_url", "typed_options"]

ENTRY_POINTS = "kvferry.storage"
"""The group of entry points by which other packages add schemes: scheme to class."""

_NONE = "none"
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://", re.ASCII)
_SECRET_NAME = re.compile(r"secret|passw|token|credential|key$", re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?\d+(_\d+)*", re.ASCII)
_SWITCH = {"true": True, "1": True, "false": False, "0": False}
_WORD = re.compile(r"\w+")
_AROUND = frozenset({"None", "NoneType", "Optional", "Union", "typing", "class"})


class StorageUrl(NamedTuple):
    """What a URL says."""

    name: str
    """What `open_backend` takes: a name of `BACKENDS`, or ``package.module:Class``."""

    place: Mapping[str, str]
    """Options that the part before the question mark stands for, such as ``path``."""

    texts: Mapping[str, str]
    """The options behind it, as they were written."""


def is_storage_url(text: str) -> bool:
    """Whether `text` is meant as a URL, or has options behind it."""
    return bool(_SCHEME.match(text)) or "?" in text


def parse_storage_url(text: str) -> StorageUrl:
    """Take a URL apart. Nothing is opened, and no backend imported.

    Raises:
        ConfigError: The scheme is not known, the place is not as the scheme wants it, or an option
            has no name or value, comes twice, or is a secret.
    """
    before, _, query = text.partition("?")
    shown = before[:80]
    if "#" in text:
        raise ConfigError(f"storage {shown!r}: a URL of storage has no '#': write it as %23")
    texts = _texts(shown, query)
    found = _SCHEME.match(before)
    if not found:
        return StorageUrl(before, {}, texts)
    scheme = found["scheme"].lower()
    rest = before[found.end() :]
    if "@" in rest.partition("/")[0]:
        raise ConfigError(
            f"storage {scheme}://…: a URL is no place for a user or password: give them as options "
            f"in the config (storage.options), or in the environment as the backend takes them"
        )
    if scheme in _PLACES:
        name, place = _PLACES[scheme](scheme, rest)
    else:
        name, place = _entry_point(scheme), {"url": f"{scheme}://{rest}"}
    if twice := sorted(place.keys() & texts.keys()):
        raise ConfigError(
            f"storage {shown!r}: the option {', '.join(twice)} is what stands before the '?'; "
            f"leave it out"
        )
    return StorageUrl(name, place, texts)


def typed_options(cls: type, texts: Mapping[str, str], what: str) -> dict[str, Any]:
    """Options of text as the kinds that the parameters of `cls` are annotated with.

    Whole numbers named ``…_bytes`` may have a unit, ``none`` is None, and what is neither number
    nor switch stays text.

    Raises:
        ConfigError: There is no such parameter, or the text does not fit it.
    """
    parameters = inspect.signature(cls).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    known = [
        name
        for name, one in parameters.items()
        if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)
        and "Callable" not in _annotation(one)
    ]
    typed: dict[str, Any] = {}
    for name, text in texts.items():
        if name in known:
            typed[name] = _value(what, name, text, _annotation(parameters[name]))
        elif takes_any and name not in parameters:
            typed[name] = text
        else:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)
            hint = f"; the nearest is {near[0]}, of {', '.join(known)}" if near else ": it has none"
            raise ConfigError(f"storage {what}: there is no option {name}{hint}")
    return typed


def _texts(shown: str, query: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    for part in query.split("&") if query else ():
        written, equals, value = part.partition("=")
        name = urllib.parse.unquote(written)
        if not equals or not name.isidentifier():
            raise ConfigError(
                f"storage {shown!r}: the option {name[:40]!r} must be name=value; options are "
                f"parted by '&', and special characters written as %XX"
            )
        if name in texts:
            raise ConfigError(f"storage {shown!r}: the option {name} comes twice; give it once")
        if _SECRET_NAME.search(name):
            raise ConfigError(
                f"storage {shown!r}: the option {name} looks like a secret, and URLs are logged: "
                f"give it in the config (storage.options), or in the environment as the backend "
                f"takes it"
            )
        texts[name] = urllib.parse.unquote(value)
    return texts


def _annotation(parameter: inspect.Parameter) -> frozenset[str]:
    """The words of an annotation. None is looked up: some are there for type checkers only."""
    given = parameter.annotation
    if given is parameter.empty:
        return frozenset()
    return frozenset(_WORD.findall(given.__name__ if isinstance(given, type) else str(given)))


def _value(what: str, name: str, text: str, words: frozenset[str]) -> Any:
    if text == _NONE and words & {"None", "NoneType", "Optional"}:
        return None
    kind = words - _AROUND
    found: int | float | None
    if kind == {"bool"}:
        allowed, found = "true or false", _SWITCH.get(text.lower())
    elif kind == {"int"}:
        allowed, found = "a whole number", int(text) if _INTEGER.fullmatch(text) else None
        if name.endswith("_bytes"):
            allowed += " of bytes, or such as 8GiB"
            found = _bytes(text) if found is None else found
    elif kind in ({"float"}, {"int", "float"}):
        allowed, found = "a number", _number(text)
    else:
        return text
    if found is None:
        raise ConfigError(f"storage {what}: {name}={text[:40]!r} must be {allowed}")
    return found


def _bytes(text: str) -> int | None:
    try:
        return bytes_of(text)
    except ValueError:
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# ---------------------------------------------------------------- schemes

_Place = tuple[str, dict[str, str]]


def _file(_: str, rest: str) -> _Place:
    path = urllib.parse.unquote(rest)
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(
            f"storage 'file://{path[:60]}': give an absolute path behind file://, as in "
            f"file:///var/cache/kv"
        )
    return "file", {"path": path}


def _memory(_: str, rest: str) -> _Place:
    if rest:
        raise ConfigError(f"storage 'memory://{rest[:60]}': memory:// has no place behind it")
    return "memory", {}


def _mooncake(_: str, rest: str) -> _Place:
    host, _colon, port = rest.removesuffix("/").rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(
            f"storage 'mooncake://{rest[:60]}': give the master, as in mooncake://10.0.0.1:50051"
        )
    return "mooncake", {"address": f"{host}:{port}"}


def _objects(scheme: str, rest: str) -> _Place:
    if not rest.partition("/")[0]:
        raise ConfigError(
            f"storage '{scheme}://{rest[:60]}': give a bucket, as in {scheme}://bucket/prefix"
        )
    return "object_store", {"url": f"{scheme}://{rest}"}


_PLACES: dict[str, Callable[[str, str], _Place]] = {
    "az": _objects,
    "file": _file,
    "gs": _objects,
    "memory": _memory,
    "mooncake": _mooncake,
    "s3": _objects,
}


def _entry_point(scheme: str) -> str:
    """The class that an installed package has for `scheme`."""
    found = {
        one.value.replace(" ", "")
        for one in importlib.metadata.entry_points(group=ENTRY_POINTS)
        if one.name == scheme
    }
    if not found:
        raise ConfigError(
            f"there is no storage scheme {scheme!r}: kvferry has {', '.join(sorted(_PLACES))}, and "
            f"packages add others by entry points in the group {ENTRY_POINTS}; install the one "
            f"that has it, or give package.module:Class"
        )
    if len(found) > 1:
        raise ConfigError(
            f"the storage scheme {scheme!r} is claimed by {' and '.join(sorted(found))}: uninstall "
            f"all but one, or give package.module:Class"
        )
    return found.pop()

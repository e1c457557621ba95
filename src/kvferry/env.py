"""Every environment variable that kvferry reads, and the only place that reads them.

Nothing is read at import: each function looks when it is called.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping

from kvferry.errors import ConfigError

__all__ = [
    "VARIABLES",
    "CacheFolder",
    "Variable",
    "bad_variables",
    "cache_folder",
    "config_file",
    "debug_checks",
    "disabled_paths",
    "setting_texts",
    "setting_variable",
]


@dataclasses.dataclass(frozen=True)
class Variable:
    """One environment variable, as the README's table shows it."""

    name: str
    kind: str
    default: str
    meaning: str


_DISABLE_PATHS = Variable(
    name="KVFERRY_DISABLE_PATHS",
    kind="comma-separated names",
    default="(none)",
    meaning="what transfers may not use, for when one of them fails on a machine: the paths `cpu`, "
    "`cpu_numpy`, `flat`, `realign`, `grouped`, and the mover `staged`",
)

_CACHE_DIR = Variable(
    name="KVFERRY_CACHE_DIR",
    kind="absolute path",
    default="`$XDG_CACHE_HOME/kvferry`, else `~/.cache/kvferry`",
    meaning="folder for compiled GPU kernels and calibrated profiles; made if absent, refused if "
    "others may write it",
)

_DEBUG = Variable(
    name="KVFERRY_DEBUG",
    kind="0 or 1",
    default="0",
    meaning="check also what only the GPU sees: indices in device memory are copied and looked at",
)

_CONFIG = Variable(
    name="KVFERRY_CONFIG",
    kind="absolute path",
    default="(none)",
    meaning="TOML file with the settings of a cache, where none is named in the program",
)

VARIABLES = (_DISABLE_PATHS, _CACHE_DIR, _DEBUG, _CONFIG)
"""Those with names of their own. `setting_variable` names one for each setting of the config."""

_PREFIX = "KVFERRY_"

# What a cluster sets in every container beside a service called kvferry, or kvferry-something.
_SET_BY_CLUSTERS = re.compile(
    r"KVFERRY_([A-Z0-9]\w*_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)",
    re.ASCII,
)


@dataclasses.dataclass(frozen=True)
class CacheFolder:
    """Where kvferry may keep what it can make again."""

    path: pathlib.Path | None
    """None: the environment names no home either."""
    is_explicit: bool
    """Somebody asked for this very folder."""


def cache_folder() -> CacheFolder:
    """The folder for caches; ConfigError where KVFERRY_CACHE_DIR is no absolute path."""
    given = os.environ.get(_CACHE_DIR.name, "")
    if given:
        # A relative folder would be another one in each process that changes its own.
        if not pathlib.Path(given).is_absolute():
            raise ConfigError(f"{_CACHE_DIR.name}={given!r} is relative; give an absolute path")
        return CacheFolder(pathlib.Path(given), is_explicit=True)
    for name, rest in (("XDG_CACHE_HOME", "kvferry"), ("HOME", ".cache/kvferry")):
        base = os.environ.get(name, "")
        # The XDG specification has relative values ignored.
        if pathlib.Path(base).is_absolute():
            return CacheFolder(pathlib.Path(base, rest), is_explicit=False)
    return CacheFolder(None, is_explicit=False)


def config_file(environ: Mapping[str, str] | None = None) -> pathlib.Path | None:
    """The file that KVFERRY_CONFIG names, if any; ConfigError where it is no absolute path.

    `environ` is the process's own unless given.
    """
    given = (os.environ if environ is None else environ).get(_CONFIG.name, "")
    if not given:
        return None
    if not pathlib.Path(given).is_absolute():
        raise ConfigError(f"{_CONFIG.name}={given!r} is relative; give an absolute path")
    return pathlib.Path(given)


def setting_variable(section: str, field: str) -> str:
    """The name of the variable for one setting: ``KVFERRY_<SECTION>_<FIELD>``."""
    return f"{_PREFIX}{section}_{field}".upper()


def setting_texts(
    tree: Mapping[str, Collection[str]], environ: Mapping[str, str] | None = None
) -> dict[tuple[str, str], str]:
    """What the environment says of settings, as text, by (section, field). Empty is not set.

    Args:
        tree: The fields of each section.
        environ: The process's own unless given.

    Raises:
        ConfigError: A variable begins like ours and is none; the message has the nearest. Names
            that clusters set for a service called kvferry are passed over.
    """
    names = {
        setting_variable(section, field): (section, field)
        for section, fields in tree.items()
        for field in fields
    }
    known = {*names, *(variable.name for variable in VARIABLES)}
    found = {}
    unknown = []
    for name, text in (os.environ if environ is None else environ).items():
        if name in names:
            if text:
                found[names[name]] = text
        elif (
            name.startswith(_PREFIX) and name not in known and not _SET_BY_CLUSTERS.fullmatch(name)
        ):
            unknown.append(name)
    if unknown:
        told = [
            f"{name} is no variable of kvferry, the nearest is "
            f"{difflib.get_close_matches(name, sorted(known), n=1, cutoff=0)[0]}"
            for name in sorted(unknown)
        ]
        raise ConfigError(f"{'; '.join(told)}: rename it, or unset it")
    return found


def debug_checks() -> bool:
    """Whether costly checks are on; ConfigError for a value that is neither 0 nor 1."""
    given = os.environ.get(_DEBUG.name, "") or _DEBUG.default
    if given not in ("0", "1"):
        raise ConfigError(f"{_DEBUG.name}={given!r} must be 0 or 1")
    return given == "1"


def disabled_paths(known: frozenset[str]) -> frozenset[str]:
    """The paths that are switched off; ConfigError for a name that is not one of `known`."""
    given = os.environ.get(_DISABLE_PATHS.name, "")
    names = frozenset(name.strip() for name in given.split(",") if name.strip())
    unknown = sorted(names - known)
    if "direct" in unknown:
        raise ConfigError(
            f"{_DISABLE_PATHS.name}={given!r}: direct cannot be switched off, for it carries what "
            f"cannot be staged; take it out, and ask for mover='staged' where an engine is made"
        )
    if unknown:
        raise ConfigError(
            f"{_DISABLE_PATHS.name}={given!r}: {', '.join(unknown)} is no path; the paths are "
            f"{', '.join(sorted(known))}"
        )
    return names


_CHECKS: Mapping[str, Callable[[frozenset[str]], object]] = {
    _DISABLE_PATHS.name: disabled_paths,
    _CACHE_DIR.name: lambda _: cache_folder(),
    _DEBUG.name: lambda _: debug_checks(),
    _CONFIG.name: lambda _: config_file(),
}


def bad_variables(known_paths: frozenset[str]) -> dict[str, str]:
    """What is wrong with each variable whose value is not accepted, by name."""
    found = {}
    for name, check in _CHECKS.items():
        try:
            check(known_paths)
        except ConfigError as bad:
            found[name] = str(bad)
    return found

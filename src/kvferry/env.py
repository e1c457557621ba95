"""Every environment variable that kvferry reads, and the only place that reads them.

Nothing is read at import: each function looks when it is called.
"""

from __future__ import annotations

import dataclasses
import os

from kvferry.errors import ConfigError

__all__ = ["VARIABLES", "Variable", "disabled_paths"]


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
    meaning="transfer paths not to use, for a bad day in production: `cpu`, `cpu_numpy`",
)

VARIABLES = (_DISABLE_PATHS,)


def disabled_paths(known: frozenset[str]) -> frozenset[str]:
    """The paths that are switched off; ConfigError for a name that is not one of `known`."""
    given = os.environ.get(_DISABLE_PATHS.name, "")
    names = frozenset(name.strip() for name in given.split(",") if name.strip())
    unknown = sorted(names - known)
    if unknown:
        raise ConfigError(
            f"{_DISABLE_PATHS.name}={given!r}: {', '.join(unknown)} is no path; the paths are "
            f"{', '.join(sorted(known))}"
        )
    return names

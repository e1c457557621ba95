"""Putting kvferry's functions in place of the engine's own, and taking them out again."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, Self

from kvferry.adapters.sglang import hicache, library_rows
from kvferry.errors import BackendInterfaceError, KVFerryError, MissingDependencyError

__all__ = ["HOMES", "POOLS", "Installed", "Replaced", "install", "install_as_plugin"]

_logger = logging.getLogger(__name__)

HOMES = ("sglang.jit_kernel.hicache", "sglang.kernels.ops.kvcache.hicache")
"""Where the engine keeps HiCache's functions: up to 0.5.18, and since."""

_SERIES = (0, 5)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(hicache, name)
    for name in hicache.__all__
    if name.startswith(("transfer_hicache_", "can_use_"))
}
# Pages of indexers and recurrent states come by way of another library's functions, which these
# pools have imported. Others that import them keep theirs: they move what no host pool holds.
POOLS = (
    "sglang.srt.mem_cache.pool_host.dsa",
    "sglang.srt.mem_cache.pool_host.mamba",
    "sglang.srt.mem_cache.memory_pool_host",
)
"""Pools beside K, V and latents whose transfers are replaced: of indexers, recurrent states and
DeepSeek V4."""

_OF_POOLS: dict[str, Callable[..., Any]] = {
    name: getattr(library_rows, name) for name in library_rows.__all__
}
_KEPT_POOLS = tuple(
    f"sglang.srt.mem_cache.{name}"
    for name in ("pool_host.mha", "pool_host.mla", "pool_host.unified", "pool_host.hisparse",
                 "hisparse_memory_pool")
)  # fmt: skip
_POOL_NAME = re.compile(r"transfer_(kv|state|mamba|cache)_\w+")
# The first that fits.
_WHY_LEFT = (
    ("_direct", "the direct I/O backend, which copies whole pages without a kernel"),
    ("_ph", "page_head pools are grouped by heads, which kvferry's kernels do not follow"),
    ("dsv4", "rows of DeepSeek V4 that are picked apart, which is more than a copy"),
    ("", "called only where HiCache's own functions are not, or for what no host pool holds"),
)
_LEFT_NAME = re.compile(r"(transfer_hicache|can_use)_\w+")


class Replaced(NamedTuple):
    """A name in a module of the engine that is kvferry's now."""

    module: str
    name: str


class Installed:
    """What `install` has done. As a context manager it is undone at the end."""

    def __init__(self, version: str) -> None:
        self.version = version
        """The engine's."""

        self.left: dict[str, str] = {}
        """Functions that stay the engine's, as ``module.name``, and why."""

        self._theirs: dict[Replaced, tuple[ModuleType, Any, Any]] = {}

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """Every name that was replaced, wherever a module had imported it."""
        return tuple(self._theirs)

    def put(self, module: ModuleType, name: str, ours: Any) -> None:
        """Replace a name, and remember what it was."""
        key = Replaced(module.__name__, name)
        self._theirs[key] = (module, getattr(module, name), ours)
        setattr(module, name, ours)

    def undo(self) -> tuple[Replaced, ...]:
        """Put back what was there; a second time does nothing.

        Returns:
            The names that somebody else has replaced since: they stay as they are.
        """
        kept = []
        with _lock:
            for key, (module, theirs, ours) in reversed(self._theirs.items()):
                if getattr(module, key.name, None) is ours:
                    setattr(module, key.name, theirs)
                else:
                    kept.append(key)
            self._theirs.clear()
        return tuple(kept)

    def __str__(self) -> str:
        lines = [f"SGLang {self.version}: {len(self._theirs)} names are kvferry's"]
        lines += [f"  replaced  {key.module}.{key.name}" for key in self._theirs]
        lines += [f"  left      {name}: {why}" for name, why in self.left.items()]
        return "\n".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


_lock = threading.Lock()


def install() -> Installed:
    """Replace HiCache's functions in this process, wherever the engine has imported them.

    Call it before the engine makes its pools: they ask at their start what the kernels can do.
    Modules that import the functions later find kvferry's.

    Returns:
        What was replaced, what was left and why, and the way back.

    Raises:
        MissingDependencyError: The engine is not installed, or of another series than 0.5.
        BackendInterfaceError: A function of this engine takes what kvferry's does not. Nothing was
            replaced.
    """
    done = Installed(_checked_version())
    homes = [home for home in map(_module, HOMES) if home is not None]
    if not homes:
        raise BackendInterfaceError(
            f"SGLang {done.version} has its HiCache functions in neither of {', '.join(HOMES)}; "
            f"install a release from 0.5.10 to 0.5.23"
        )
    pools = {name: _pool(name, done) for name in POOLS}
    with _lock:
        wanted = list(_of_homes(homes, done)) + list(_of_pools(pools, done))
        _check_parameters(wanted)
        for module, name, ours in wanted:
            # One module may be known by two names.
            if getattr(module, name) is not ours:
                done.put(module, name, ours)
    _logger.info("%s", done)
    return done


def install_as_plugin() -> None:
    """For the engine's plug-ins: every process of it calls this at its start.

    Where kvferry cannot serve this engine, its own functions stay, and the log has the reason.
    """
    try:
        install()
    except KVFerryError as bad:
        _logger.error("the engine's own HiCache functions stay in place: %s", bad)


def _checked_version() -> str:
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as absent:
        raise MissingDependencyError(
            "SGLang is not installed; pip install sglang==0.5.23"
        ) from absent
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers != _SERIES:
        raise MissingDependencyError(
            f"SGLang is {version}, and kvferry knows the functions of 0.5; "
            f"pip install sglang==0.5.23, or leave its own functions in place"
        )
    return version


def _module(name: str) -> ModuleType | None:
    """A module of the engine, imported; None where this release has none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as absent:
        if absent.name is not None and (name == absent.name or name.startswith(f"{absent.name}.")):
            return None
        raise


def _pool(name: str, done: Installed) -> ModuleType | None:
    """A pool's module; None, with a word of it, where it needs what only a serving machine has."""
    try:
        return importlib.import_module(name)
    except ImportError as absent:
        done.left[name] = f"this engine cannot import it on this machine: {absent}"
        return None


def _of_homes(
    homes: Iterable[ModuleType], done: Installed
) -> Iterable[tuple[ModuleType, str, Callable[..., Any]]]:
    """Names to replace: in the functions' homes, and wherever they were imported, also renamed."""
    ours_of: dict[int, Callable[..., Any]] = {}
    for home in homes:
        for name, theirs in list(vars(home).items()):
            if name in _FUNCTIONS:
                ours_of[id(theirs)] = _FUNCTIONS[name]
            elif _LEFT_NAME.fullmatch(name) and callable(theirs):
                done.left[f"{home.__name__}.{name}"] = (
                    "page_unified pages are grouped by heads, which kvferry's kernels do not follow"
                    if "page_unified" in name
                    else "kvferry has no such function"
                )
    for module_name, module in sorted(sys.modules.items()):
        if isinstance(module, ModuleType) and module_name.split(".")[0] == "sglang":
            for name, value in list(vars(module).items()):
                if id(value) in ours_of and callable(value):
                    yield module, name, ours_of[id(value)]


def _of_pools(
    pools: Mapping[str, ModuleType | None], done: Installed
) -> Iterable[tuple[ModuleType, str, Callable[..., Any]]]:
    """Names of the pools to replace; of the others it is noted why they stay."""
    kept = {name: sys.modules.get(name) for name in _KEPT_POOLS}
    for module_name, module in {**pools, **kept}.items():
        if module is None:
            continue
        for name, theirs in list(vars(module).items()):
            if not _POOL_NAME.fullmatch(name) or not callable(theirs):
                continue
            if name in _OF_POOLS and module_name in pools:
                yield module, name, _OF_POOLS[name]
            elif "hicache" not in name:
                why = next(why for part, why in _WHY_LEFT if part in name)
                done.left[f"{module_name}.{name}"] = why


def _check_parameters(wanted: Iterable[tuple[ModuleType, str, Callable[..., Any]]]) -> None:
    """Raise BackendInterfaceError where the engine may pass what ours does not take."""
    missing = []
    for module, name, ours in wanted:
        try:
            theirs = inspect.signature(getattr(module, name)).parameters
        except ValueError:
            continue  # not written in Python: nothing tells
        named = {
            parameter
            for parameter, told in theirs.items()
            if told.kind not in (told.VAR_POSITIONAL, told.VAR_KEYWORD)
        }
        unknown = sorted(named - set(inspect.signature(ours).parameters))
        if unknown:
            missing.append(f"{module.__name__}.{name} takes {', '.join(unknown)}")
    if missing:
        raise BackendInterfaceError(
            f"{'; '.join(missing)}: this kvferry does not; install the release that it was tested "
            f"with (0.5.23), or leave the engine's own functions in place"
        )

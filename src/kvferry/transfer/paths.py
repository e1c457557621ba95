"""Which path serves a device pool, and what is switched off."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvferry.env import bad_variables, disabled_paths
from kvferry.errors import ConfigError, DriverError, MissingDependencyError
from kvferry.kernels import CopyPath, native_library
from kvferry.kernels.jit import process_loader
from kvferry.transfer.native_mover import move_span_native
from kvferry.transfer.numpy_mover import move_span_numpy
from kvferry.types import Mover

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Collection

    import numpy as np
    from numpy.typing import NDArray

    from kvferry.transfer.span_move import SpanMove
    from kvferry.types import Direction

__all__ = [
    "CpuPath",
    "MoveSpan",
    "available_cpu_paths",
    "available_gpu_paths",
    "check_environment",
    "check_gpu_paths",
    "choose_cpu_path",
    "compiled_submit",
    "disabled_gpu_paths",
    "staging_is_disabled",
    "why_no_gpu",
]


class MoveSpan(Protocol):
    """Moves one span of every page; returns which pages hold the right bytes, shape ``[N]``.

    A store writes the digest table, 0 where `verify` is off. A load checks it and leaves the device
    rows of a page that fails, or has no digest, untouched.
    """

    def __call__(
        self, move: SpanMove, direction: Direction, *, verify: bool
    ) -> NDArray[np.bool_]: ...


class CpuPath(NamedTuple):
    """A path between two pools in host memory."""

    name: str
    move_span: MoveSpan


_COMPILED = CpuPath("cpu", move_span_native)
_PORTABLE = CpuPath("cpu_numpy", move_span_numpy)
_NAMES = frozenset({_COMPILED.name, _PORTABLE.name})
_ALL_NAMES = _NAMES | {path.value for path in CopyPath} | {Mover.STAGED.value}


def available_cpu_paths() -> tuple[CpuPath, ...]:
    """The paths that work here and are not switched off, best first."""
    off = disabled_paths(_ALL_NAMES)
    wanted = [path for path in (_COMPILED, _PORTABLE) if path.name not in off]
    # A kernel that is switched off is not even opened: it may be the reason.
    return tuple(path for path in wanted if path is _PORTABLE or native_library() is not None)


def available_gpu_paths() -> tuple[CopyPath, ...]:
    """The paths for GPU pools that are not switched off; none where no GPU can be used."""
    off = disabled_gpu_paths()
    usable = not why_no_gpu()
    return tuple(path for path in CopyPath if usable and path not in off)


def why_no_gpu() -> str:
    """Why no GPU can be used here, and what to do; empty where one can."""
    try:
        if process_loader().driver.num_devices > 0:
            return ""
    except (MissingDependencyError, DriverError) as absent:
        return str(absent)
    return "the driver shows no GPU to this process: check nvidia-smi and CUDA_VISIBLE_DEVICES"


def check_environment() -> dict[str, str]:
    """What is wrong with each environment variable whose value is not accepted, by name."""
    return bad_variables(_ALL_NAMES)


def disabled_gpu_paths() -> frozenset[CopyPath]:
    """The GPU paths that are switched off."""
    return frozenset(path for path in CopyPath if path.value in disabled_paths(_ALL_NAMES))


def check_gpu_paths(disabled: Collection[CopyPath]) -> None:
    """Raise ConfigError where all paths for GPU pools are `disabled`."""
    if not set(CopyPath) - set(disabled):
        raise ConfigError(
            "every path for GPU pools is switched off; take one out of KVFERRY_DISABLE_PATHS"
        )


def staging_is_disabled() -> bool:
    """Whether the staged mover is switched off."""
    return Mover.STAGED.value in disabled_paths(_ALL_NAMES)


def compiled_submit() -> ctypes.CDLL | None:
    """What submits staged transfers; None: it was not compiled, or the cpu path is switched off.

    Raises:
        ConfigError: There is such code, and it cannot be used.
    """
    return None if _COMPILED.name in disabled_paths(_ALL_NAMES) else native_library()


def choose_cpu_path(name: str | None = None) -> CpuPath:
    """The best path between two pools in host memory, or the one called `name`.

    Raises ConfigError if all are switched off, or `name` is off, not built here, or unknown.
    """
    paths = available_cpu_paths()
    if not paths:
        raise ConfigError(
            "every path between pools in host memory is switched off; take one of "
            f"{', '.join(sorted(_NAMES))} out of KVFERRY_DISABLE_PATHS"
        )
    if name is None:
        return paths[0]
    for path in paths:
        if path.name == name:
            return path
    raise ConfigError(
        f"path {name!r} is not to be had here; there are: {', '.join(path.name for path in paths)}"
    )

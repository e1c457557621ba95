"""What the user of an engine may choose on a GPU, checked before anything is allocated."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError
from kvferry.kernels import UNROLLS, CopyPath
from kvferry.transfer.movers import DEFAULT_STAGING_BYTES
from kvferry.transfer.paths import (
    check_gpu_paths,
    compiled_submit,
    disabled_gpu_paths,
    staging_is_disabled,
)
from kvferry.transfer.router import check_staging_bytes
from kvferry.types import Mover

if TYPE_CHECKING:
    import ctypes

    from kvferry.transfer.host_pages import HostPages
    from kvferry.transfer.profile import DeviceProfile

__all__ = ["GpuOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Options of a `GpuCarrier`. `checked` makes them of what users give."""

    verify: bool
    """Make digests on store and check them on load."""

    blocks: int | None = None
    """Blocks of a launch; None: as measured."""

    path: CopyPath | None = None
    """Carry everything this way, or refuse; None: flat, where it cannot realign."""

    unroll: int | None = None
    """With grouped: how its threads share an element."""

    disabled: frozenset[CopyPath] = frozenset()
    """Paths not to use."""

    mover: Mover | None = None
    """Take this one; None: the faster for each plan."""

    staging_bytes: int = DEFAULT_STAGING_BYTES
    """Device memory of each direction for what is staged; 0: none."""

    why_not_staged: str = ""
    """A reason not to stage that has nothing to do with the pools, or nothing."""

    profile: DeviceProfile | None = None
    """What the device can do; None: as calibrated, or the built-in one."""

    timed: bool = False
    """Note when bytes were on the link."""

    compiled: ctypes.CDLL | None = None
    """What submits staged transfers; None: Python does."""

    @classmethod
    def checked(
        cls,
        host: HostPages,
        *,
        verify: bool,
        path: str | None,
        unroll: int | None,
        num_blocks: int | None,
        mover: str | None,
        staging_bytes: int | None,
        profile: DeviceProfile | None,
        timed: bool = False,
    ) -> GpuOptions:
        """As `TransferEngine` takes them, with what the environment switches off.

        Raises:
            ConfigError: `path` or `mover` is none or is switched off, `num_blocks` is below 1, or
                `staging_bytes` is too little for a page of one layer.
        """
        if num_blocks is not None and not _is_whole(num_blocks, at_least=1):
            raise ConfigError(f"num_blocks={num_blocks!r}: give a whole number from 1, or None")
        if unroll is not None and (unroll not in UNROLLS or path not in (None, "grouped")):
            raise ConfigError(
                f"unroll={unroll} with path={path!r}: it is one of "
                f"{', '.join(map(str, UNROLLS))}, and goes with grouped alone"
            )
        disabled = disabled_gpu_paths()
        check_gpu_paths(disabled)
        names = [one.value for one in CopyPath if one not in disabled]
        if path is not None and path not in names:
            raise ConfigError(
                f"path {path!r} is not to be had for GPU pools; there are: {', '.join(names)}"
            )
        if mover is not None and mover not in list(Mover):
            raise ConfigError(f"mover {mover!r} is none of {', '.join(Mover)}; or give None")
        staged_off = staging_is_disabled()
        if staging_bytes is None:
            staging_bytes = DEFAULT_STAGING_BYTES
        elif not _is_whole(staging_bytes, at_least=0):
            raise ConfigError(
                f"staging_bytes={staging_bytes!r}: give a whole number of bytes from 0, or None"
            )
        elif staging_bytes and mover is None and path is None and not staged_off:
            check_staging_bytes(host, staging_bytes)
        why_not = ""
        if staged_off:
            why_not = "switched off by KVFERRY_DISABLE_PATHS"
        elif not staging_bytes:
            why_not = "staging_bytes is 0"
        elif mover is None and (path is not None or unroll is not None):
            why_not = "a kernel is asked for, and no mover"
        elif mover == Mover.DIRECT:
            why_not = "the direct mover is asked for"
        return cls(
            verify=verify,
            blocks=num_blocks,
            path=None if path is None else CopyPath(path),
            unroll=unroll,
            disabled=disabled,
            mover=None if mover is None else Mover(mover),
            staging_bytes=staging_bytes,
            why_not_staged=why_not,
            profile=profile,
            timed=timed,
            compiled=compiled_submit(),
        )


def _is_whole(given: object, *, at_least: int) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= at_least

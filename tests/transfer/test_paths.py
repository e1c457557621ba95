"""Which paths there are for GPU pools, where the driver is broken or names are wrong."""

from __future__ import annotations

import pytest

from kvferry.errors import (
    ConfigError,
    CubinCacheError,
    DriverError,
    DriverTooOldError,
    KVFerryError,
    MissingDependencyError,
    NoDeviceError,
)
from kvferry.kernels import CopyPath
from kvferry.transfer import available_gpu_paths, disabled_gpu_paths, paths


@pytest.mark.parametrize(
    "error", [MissingDependencyError, NoDeviceError, DriverTooOldError, DriverError]
)
def test_a_driver_that_cannot_be_used_has_no_paths(
    monkeypatch: pytest.MonkeyPatch, error: type[KVFerryError]
) -> None:
    """Whatever is wrong with it: the paths for host memory must stay usable."""

    def broken() -> None:
        raise error("so it is")

    monkeypatch.setattr(paths, "process_loader", broken)
    assert available_gpu_paths() == ()


def test_a_cache_that_cannot_be_trusted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad setting is an error, not a machine without a GPU."""

    def refused() -> None:
        raise CubinCacheError("others may write there")

    monkeypatch.setattr(paths, "process_loader", refused)
    with pytest.raises(CubinCacheError):
        available_gpu_paths()


def test_names_that_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of GPU paths alone; a misspelt one is refused."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "cpu, realign,grouped")
    assert disabled_gpu_paths() == {CopyPath.REALIGN, CopyPath.GROUPED}
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "realing")
    with pytest.raises(ConfigError, match="realing is no path"):
        disabled_gpu_paths()
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "direct")
    with pytest.raises(ConfigError, match=r"direct cannot be switched off, .*mover='staged'"):
        disabled_gpu_paths()

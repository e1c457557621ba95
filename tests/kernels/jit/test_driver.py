"""The driver: one typed error for each thing that can be wrong, and contexts left as found."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
from tests.kernels.jit.conftest import FakeBindings

from kvferry.errors import (
    DriverError,
    DriverTooOldError,
    MissingDependencyError,
    NoDeviceError,
)
from kvferry.kernels.jit import Driver


def _calls(bindings: FakeBindings, name: str) -> list[tuple[Any, ...]]:
    return [call for call in bindings.calls if call[0] == name]


def test_a_context_tells_its_gpu(driver: Driver) -> None:
    """Version, number of GPUs, capability and multiprocessors are the driver's."""
    context = driver.context(1)
    assert (driver.version, driver.num_devices) == ((13, 0), 2)
    assert (context.device, context.capability, context.num_multiprocessors) == (1, (9, 0), 132)


def test_no_driver(bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without libcuda is told so, not with the bindings' RuntimeError."""

    def absent(flags: int) -> Any:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(bindings, "cuInit", absent)
    with pytest.raises(NoDeviceError, match=r"libcuda\.so\.1.*install it"):
        Driver(bindings, "13.0.3")


def test_no_gpu(bindings: FakeBindings) -> None:
    """A driver without a GPU has its code, its words and the next step in the error."""
    bindings.fails["cuInit"] = bindings.CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(
        NoDeviceError, match=r"CUDA_ERROR_NO_DEVICE \(100\), as it.*nvidia-smi"
    ) as e:
        Driver(bindings, "13.0.3")
    assert e.value.code == 100


@pytest.mark.parametrize("device", [-1, 2, 7])
def test_a_gpu_that_is_not_there(driver: Driver, device: int) -> None:
    """The message has how many there are."""
    with pytest.raises(NoDeviceError, match=f"no GPU {device}: this process sees 2"):
        driver.context(device)


@pytest.mark.parametrize(
    ("version", "package"), [(12040, "nvrtc-cu12"), (12090, "nvrtc-cu12"), (11080, "nvrtc-cu12")]
)
def test_bindings_newer_than_the_driver(bindings: FakeBindings, version: int, package: str) -> None:
    """They are refused: functions changed their parameters between major versions."""
    bindings.version = version
    with pytest.raises(DriverTooOldError, match=rf"13\.0\.3.*{package}"):
        Driver(bindings, "13.0.3")


def test_bindings_older_than_the_driver(bindings: FakeBindings) -> None:
    """They work."""
    assert Driver(bindings, "12.9.4").version == (13, 0)


def test_without_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the line that installs them."""
    importing = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError(f"No module named {name!r}")
        return importing(name, *rest, **more)

    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingDependencyError, match=r"pip install 'cuda-bindings"):
        Driver.open()


def test_an_error_has_name_number_and_text(driver: Driver, bindings: FakeBindings) -> None:
    """Of the call that failed."""
    bindings.fails["cuDevicePrimaryCtxRetain"] = bindings.CUresult.CUDA_ERROR_NOT_INITIALIZED
    with pytest.raises(
        DriverError, match=r"cuDevicePrimaryCtxRetain: .*INITIALIZED \(3\), as"
    ) as e:
        driver.context(0)
    assert e.value.code == 3


def test_a_function_that_the_driver_lacks(driver: Driver, bindings: FakeBindings) -> None:
    """Both of the bindings' ways to say it become the same error."""

    def absent() -> Any:
        raise RuntimeError('Function "cuNew" not found')

    bindings.cuNew = absent  # type: ignore[attr-defined]
    for name in ("cuNew", "cuNewer"):
        with pytest.raises(DriverTooOldError, match=f"no {name} in this driver.*update"):
            driver.call(name)


def test_the_primary_context_is_kept_once(driver: Driver, bindings: FakeBindings) -> None:
    """It is the frameworks' own; it is retained once and released once."""
    context = driver.context(0)
    assert driver.context(0) is context
    context.close()
    context.close()
    retained = _calls(bindings, "cuDevicePrimaryCtxRetain")
    assert retained == [("cuDevicePrimaryCtxRetain", "device 0")]
    assert _calls(bindings, "cuDevicePrimaryCtxRelease") == [
        ("cuDevicePrimaryCtxRelease", "device 0")
    ]
    assert driver.context(0) is not context


def test_the_thread_s_context_is_put_back(driver: Driver, bindings: FakeBindings) -> None:
    """After the block, also when it raises, and then the block's own error is what is raised."""
    context = driver.context(0)
    with context.current():
        assert bindings.depth == 1
    assert bindings.depth == 0
    bindings.fails["cuCtxPopCurrent"] = bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT
    with pytest.raises(KeyError, match="theirs"), context.current():
        raise KeyError("theirs")
    assert bindings.depth == 0
    with pytest.raises(DriverError, match="cuCtxPopCurrent"), context.current():
        pass


def test_a_thread_gets_a_context_for_good_when_asked(
    driver: Driver, bindings: FakeBindings
) -> None:
    """`make_current` sets the primary context."""
    driver.context(1).make_current()
    assert _calls(bindings, "cuCtxSetCurrent") == [("cuCtxSetCurrent", "context of device 1")]


def test_a_function_is_loaded_at_once(driver: Driver, bindings: FakeBindings) -> None:
    """Not at its first launch, which may be inside a graph capture."""
    function = driver.context(0).load(b"cubin", 13).function("copy")
    assert _calls(bindings, "cuFuncLoad") == [("cuFuncLoad", "function copy")]
    assert (function.name, function.registers, function.local_bytes) == ("copy", 40, 16)
    assert (function.shared_bytes, function.max_threads) == (2048, 1024)
    assert bindings.depth == 0


def test_drivers_that_cannot_load_a_function_are_not_asked(bindings: FakeBindings) -> None:
    """`cuFuncLoad` came with CUDA 12.4."""
    bindings.version = 12020
    Driver(bindings, "12.9.4").context(0).load(b"cubin", 12).function("copy")
    assert not _calls(bindings, "cuFuncLoad")


@pytest.mark.parametrize(("compiler", "driver_release"), [(13, 12080), (14, 13000)])
def test_a_cubin_of_a_newer_major_version(
    bindings: FakeBindings, compiler: int, driver_release: int
) -> None:
    """It is refused before the driver sees it."""
    bindings.version = driver_release
    context = Driver(bindings, "12.9.4").context(0)
    with pytest.raises(DriverTooOldError, match=f"compiled by CUDA {compiler}.*pip install"):
        context.load(b"cubin", compiler)
    assert not _calls(bindings, "cuModuleLoadData")


def test_a_cubin_for_another_gpu(driver: Driver, bindings: FakeBindings) -> None:
    """The driver's refusal comes with what it means, and the context is put back."""
    bindings.fails["cuModuleLoadData"] = bindings.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(DriverError, match="another kind of GPU"):
        driver.context(0).load(b"cubin", 13)
    assert bindings.depth == 0


def test_a_module_is_unloaded_once(driver: Driver, bindings: FakeBindings) -> None:
    """A second `unload` does nothing."""
    module = driver.context(0).load(b"cubin", 13)
    module.unload()
    module.unload()
    assert len(_calls(bindings, "cuModuleUnload")) == 1

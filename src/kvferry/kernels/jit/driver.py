"""The CUDA driver: versions, contexts, modules and functions. Works beside any framework.

Contexts are the primary ones of their devices, which CUDA's runtime and every framework use too.
Nothing here sets a context for good except `Context.make_current`, which says so.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from contextlib import AbstractContextManager
from typing import Any

from kvferry.errors import (
    DriverError,
    DriverTooOldError,
    MissingDependencyError,
    NoDeviceError,
)
from kvferry.kernels.jit.packages import PACKAGES, install_line

__all__ = ["Context", "Driver", "Function", "Module", "driver_version"]

# The bindings load functions by version, so one that the driver lacks is a RuntimeError when it is
# called; one that the bindings lack is an AttributeError.
_ABSENT = (AttributeError, RuntimeError)

_BUS_ID_BYTES = 16
_NO_DEVICE = frozenset(
    {
        "CUDA_ERROR_NO_DEVICE",
        "CUDA_ERROR_STUB_LIBRARY",
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "CUDA_ERROR_SYSTEM_NOT_READY",
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "CUDA_ERROR_INVALID_DEVICE",
    }
)


@functools.cache
def driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the installed driver runs, (major, minor); None without a driver.

    It needs neither bindings nor a GPU, and starts nothing.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return _release(version.value)


class Driver:
    """The initialised driver, behind `cuda.bindings.driver` or what stands for it."""

    def __init__(self, bindings: Any, bindings_version: str) -> None:
        """Initialise the driver.

        Args:
            bindings: the module with the driver's functions.
            bindings_version: the version of that module's package.

        Raises:
            NoDeviceError: there is no driver, or no GPU that it can use.
            DriverTooOldError: the bindings are of a newer CUDA than the driver.
        """
        self.bindings = bindings
        self._contexts: dict[int, Context] = {}
        try:
            status = bindings.cuInit(0)
        except RuntimeError as error:
            raise NoDeviceError(
                f"the NVIDIA driver does not open ({error}); install it, or in a container pass "
                "the GPU through. Pools in host memory need no driver, but a GPU does"
            ) from error
        self.check(status, "start")
        self.version = _release(self.call("cuDriverGetVersion"))
        """The newest CUDA that it runs, (major, minor)."""
        major = int(bindings_version.partition(".")[0])
        if major > self.version[0]:
            raise DriverTooOldError(
                f"cuda-bindings {bindings_version} is made for drivers of CUDA {major}, and this "
                f"one is of {self._release_text}; update the driver, or "
                f"{install_line(self.version[0])}"
            )

    @classmethod
    def open(cls) -> Driver:
        """The driver of this machine; raises as the constructor does.

        Raises:
            MissingDependencyError: the bindings are not installed.
        """
        try:
            from cuda.bindings import driver
        except ImportError as error:
            found = driver_version()
            line = install_line(max(PACKAGES) if found is None else found[0])
            raise MissingDependencyError(
                f"cuda-bindings is not installed, and a GPU cannot be used without it: {line}"
            ) from error
        return cls(driver, importlib.metadata.version("cuda-bindings"))

    @property
    def _release_text(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver's `name`; what it returns beside its status: nothing, one value or more.

        Raises:
            DriverTooOldError: the driver or the bindings have no such function.
            NoDeviceError, DriverError: it refused.
        """
        try:
            result = getattr(self.bindings, name)(*arguments)
        except _ABSENT as error:
            raise DriverTooOldError(
                f"there is no {name} in this driver (CUDA {self._release_text}) or its bindings "
                f"({error}); update them"
            ) from error
        return self.check(result, f"carry out {name}")

    def entry_point(self, name: str, version: int) -> int:
        """Where the function `name` lies, in its form of CUDA `version` (12080, say).

        Raises DriverTooOldError where there is none, and NoDeviceError and DriverError as `call`.
        """
        address, _ = self.call("cuGetProcAddress", name.encode(), version, 0)
        if not address:
            raise DriverTooOldError(f"this driver has no {name}; update it")
        return int(address)

    def check(self, result: tuple[Any, ...], doing: str) -> Any:
        """What `result`, as the bindings return it, has beside a status that must be success."""
        status, *values = result
        if status:
            raise self.error(status, f"the CUDA driver could not {doing}")
        return values[0] if len(values) == 1 else tuple(values) or None

    def error(self, status: Any, what: str, kind: type[DriverError] = DriverError) -> DriverError:
        """An error that says `what` failed and why, ready to be raised."""
        name, text = self._texts(status)
        hint = _HINTS.get(name, "")
        if kind is DriverError and name in _NO_DEVICE:
            kind = NoDeviceError
        error = kind(f"{what}: {name} ({int(status)}), {text}{hint and '; '}{hint}")
        error.code = int(status)
        return error

    def _texts(self, status: Any) -> tuple[str, str]:
        found = []
        for function in (self.bindings.cuGetErrorName, self.bindings.cuGetErrorString):
            failed, text = function(status)
            found.append("unknown to this driver" if failed or text is None else text.decode())
        return found[0], found[1]

    @property
    def num_devices(self) -> int:
        """How many GPUs this process may use."""
        return int(self.call("cuDeviceGetCount"))

    def context(self, device: int) -> Context:
        """The primary context of GPU `device`, kept until `Context.close`.

        Raises:
            NoDeviceError: there is no such GPU.
        """
        if device not in self._contexts:
            count = self.num_devices
            if not 0 <= device < count:
                raise NoDeviceError(
                    f"there is no GPU {device}: this process sees {count}; the first is 0"
                )
            # Where two threads race here the device is retained twice, which does no harm.
            self._contexts.setdefault(device, Context(self, device))
        return self._contexts[device]


class Context:
    """The primary context of one GPU, shared with the frameworks in this process."""

    def __init__(self, driver: Driver, device: int) -> None:
        """Made by `Driver.context`."""
        self.driver = driver
        self.device = device
        self._handle = driver.call("cuDeviceGet", device)
        attribute = driver.bindings.CUdevice_attribute
        self.capability: tuple[int, int] = (
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        self.num_multiprocessors = self._attribute(
            attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        )
        self._context: Any = driver.call("cuDevicePrimaryCtxRetain", self._handle)

    def _attribute(self, attribute: Any) -> int:
        return int(self.driver.call("cuDeviceGetAttribute", attribute, self._handle))

    @property
    def bus_id(self) -> str:
        """The GPU's PCI address, such as ``0000:65:00.0``, in small letters."""
        told: bytes = self.driver.call("cuDeviceGetPCIBusId", _BUS_ID_BYTES, self._handle)
        return told.partition(b"\0")[0].decode().strip().lower()

    def current(self) -> AbstractContextManager[None]:
        """Make this the calling thread's context for the block, and what it was before after it."""
        return _Current(self.driver, self._context)

    def beside_captures(self) -> AbstractContextManager[None]:
        """As `current`, for calls that would spoil the capture of a graph elsewhere."""
        return _BesideCaptures(self.driver, self._context)

    def is_capturing(self, stream: Any) -> bool:
        """Whether `stream` (its handle) records a graph just now, instead of working."""
        none = self.driver.bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        return bool(self.driver.call("cuStreamIsCapturing", stream) != none)

    def make_current(self) -> None:
        """Make this the calling thread's context, for good: a thread that launches needs one."""
        self.driver.call("cuCtxSetCurrent", self._context)

    def load(self, image: bytes, compiler_major: int) -> Module:
        """Load a cubin.

        Args:
            image: the cubin.
            compiler_major: the major version of the CUDA that compiled it.

        Raises:
            DriverTooOldError: the compiler is of a newer major version than the driver.
            DriverError: the driver refused the cubin.
        """
        driver = self.driver
        if compiler_major > driver.version[0]:
            raise DriverTooOldError(
                f"the kernel was compiled by CUDA {compiler_major}, and the driver is of CUDA "
                f"{driver.version[0]}.{driver.version[1]}; update the driver, or "
                f"{install_line(driver.version[0])}"
            )
        with self.current():
            return Module(self, driver.call("cuModuleLoadData", image))

    def close(self) -> None:
        """Give the context back. Modules and functions of it must not be used after that."""
        if self._context is not None:
            self.driver._contexts.pop(self.device, None)
            self._context = None
            self.driver.call("cuDevicePrimaryCtxRelease", self._handle)


# Classes and not generators, as each transfer enters one several times.
class _Current:
    """`Context.current`."""

    __slots__ = ("_context", "_driver")

    def __init__(self, driver: Driver, context: Any) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        pushed = self._driver.bindings.cuCtxPushCurrent(self._context)
        self._driver.check(pushed, "carry out cuCtxPushCurrent")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        popped = self._driver.bindings.cuCtxPopCurrent()
        # The caller's error matters more than one of the pop.
        if kind is None:
            self._driver.check(popped, "carry out cuCtxPopCurrent")


class _BesideCaptures(_Current):
    """`Context.beside_captures`."""

    __slots__ = ("_usual",)

    def __enter__(self) -> None:
        super().__enter__()
        bindings = self._driver.bindings
        relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        status, self._usual = bindings.cuThreadExchangeStreamCaptureMode(relaxed)
        if status:
            bindings.cuCtxPopCurrent()
            raise self._driver.error(
                status, "the CUDA driver could not carry out cuThreadExchangeStreamCaptureMode"
            )

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._driver.bindings.cuThreadExchangeStreamCaptureMode(self._usual)
        super().__exit__(kind, *rest)


class Module:
    """A loaded cubin."""

    def __init__(self, context: Context, handle: Any) -> None:
        """Made by `Context.load`."""
        self.context = context
        self._handle: Any = handle

    def function(self, name: str) -> Function:
        """The kernel `name`, ready to be launched, also inside a graph capture.

        Raises:
            DriverError: there is no such kernel.
        """
        driver = self.context.driver
        with self.context.current():
            result = driver.bindings.cuModuleGetFunction(self._handle, name.encode())
            handle = driver.check(result, f'find kernel {name!r} (is it extern "C"?)')
            # A function that is still to be loaded at its first launch breaks a graph capture.
            # Drivers before 12.4 cannot be asked, and load when the function is looked up.
            if driver.version >= (12, 4):
                driver.call("cuFuncLoad", handle)
            return Function(self.context, name, handle)

    def unload(self) -> None:
        """Unload it. No kernel of it may be running or be launched again."""
        if self._handle is not None:
            with self.context.current():
                self.context.driver.call("cuModuleUnload", self._handle)
            self._handle = None


class Function:
    """A kernel of a loaded module, and what it takes of a multiprocessor."""

    def __init__(self, context: Context, name: str, handle: Any) -> None:
        """Made by `Module.function`, with the context current."""
        self.context = context
        self.name = name
        self.handle = handle
        attribute = context.driver.bindings.CUfunction_attribute
        self.registers = self._attribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS)
        self.local_bytes = self._attribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        """Local memory a thread: stack and spills."""
        self.shared_bytes = self._attribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        """Static shared memory a block."""
        self.max_threads = self._attribute(attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        """The largest block that its registers and shared memory allow."""

    def _attribute(self, attribute: Any) -> int:
        return int(self.context.driver.call("cuFuncGetAttribute", attribute, self.handle))

    def allow_dynamic_shared(self, num_bytes: int) -> None:
        """Let blocks have `num_bytes` of dynamic shared memory, also beyond the usual 48 KiB."""
        kind = self.context.driver.bindings.CUfunction_attribute
        wanted = kind.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self.context.current():
            self.context.driver.call("cuFuncSetAttribute", self.handle, wanted, num_bytes)


def _release(version: int) -> tuple[int, int]:
    """CUDA's version number, 13020, as (13, 2)."""
    return version // 1000, version % 1000 // 10


# What to do about the codes that users meet.
_LOST = (
    "an earlier kernel of this process failed, on any stream; its context is lost and no result "
    "after it counts: restart the process, and find the kernel with compute-sanitizer or "
    "CUDA_LAUNCH_BLOCKING=1"
)
_HINTS = {
    "CUDA_ERROR_NO_DEVICE": "the driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_STUB_LIBRARY": "libcuda.so.1 is the toolkit's stub: take it off LD_LIBRARY_PATH",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "libcuda.so.1 and the kernel module differ: reboot, or "
    "install the same version of both",
    "CUDA_ERROR_SYSTEM_NOT_READY": "a service of the driver is not running (on machines with "
    "NVSwitch: the fabric manager)",
    "CUDA_ERROR_OUT_OF_MEMORY": "device memory is full: let the engine reserve less",
    "CUDA_ERROR_INVALID_CONTEXT": "the calling thread has no context: call Context.make_current "
    "there first",
    "CUDA_ERROR_INVALID_HANDLE": "the stream, event or kernel was destroyed, or belongs to another "
    "GPU",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the cubin is for another kind of GPU",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "the block is too large for the kernel's registers or "
    "shared memory",
    "CUDA_ERROR_ILLEGAL_ADDRESS": _LOST,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _LOST,
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": _LOST,
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": _LOST,
    "CUDA_ERROR_INVALID_PC": _LOST,
    "CUDA_ERROR_HARDWARE_STACK_ERROR": _LOST,
    "CUDA_ERROR_LAUNCH_FAILED": _LOST,
    "CUDA_ERROR_LAUNCH_TIMEOUT": _LOST,
    "CUDA_ERROR_ASSERT": _LOST,
}

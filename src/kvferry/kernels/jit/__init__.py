"""GPU kernels at run time: compile with NVRTC, keep the cubins, load and launch them.

Importing this loads neither the compiler nor the driver, and reads nothing.
"""

from kvferry.kernels.jit.build import Cubin, CubinOrigin, KernelLoader, cubin_for, process_loader
from kvferry.kernels.jit.cache_files import (
    ROOT,
    complaint,
    others_may_write,
    publish_file,
    read_file,
)
from kvferry.kernels.jit.compiler import (
    OPTIONS,
    Compiler,
    CompileReport,
    KernelResources,
    architecture,
    compile_cubin,
    compile_report,
    installed_compiler,
)
from kvferry.kernels.jit.cubin_cache import CacheCounts, CubinCache
from kvferry.kernels.jit.driver import Context, Driver, Function, Module, driver_version
from kvferry.kernels.jit.kernel_source import Header, KernelSource, cubin_key
from kvferry.kernels.jit.launch import MAX_SHARED_BYTES, PreparedLaunch
from kvferry.kernels.jit.packages import install_line
from kvferry.kernels.jit.piece_copy import PieceCopy
from kvferry.kernels.jit.queue import DeviceBuffer, Event, PinnedBuffer, Stream
from kvferry.kernels.jit.row_copy import RowCopy

__all__ = [
    "MAX_SHARED_BYTES",
    "OPTIONS",
    "ROOT",
    "CacheCounts",
    "CompileReport",
    "Compiler",
    "Context",
    "Cubin",
    "CubinCache",
    "CubinOrigin",
    "DeviceBuffer",
    "Driver",
    "Event",
    "Function",
    "Header",
    "KernelLoader",
    "KernelResources",
    "KernelSource",
    "Module",
    "PieceCopy",
    "PinnedBuffer",
    "PreparedLaunch",
    "RowCopy",
    "Stream",
    "architecture",
    "compile_cubin",
    "compile_report",
    "complaint",
    "cubin_for",
    "cubin_key",
    "driver_version",
    "install_line",
    "installed_compiler",
    "others_may_write",
    "process_loader",
    "publish_file",
    "read_file",
]

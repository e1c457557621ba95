"""From a kernel's source to a loaded module: out of the cache, or through the compiler."""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

from kvferry.kernels.jit.compiler import OPTIONS, architecture, compile_cubin, installed_compiler
from kvferry.kernels.jit.cubin_cache import CubinCache
from kvferry.kernels.jit.driver import Driver, Module
from kvferry.kernels.jit.kernel_source import KernelSource, cubin_key

__all__ = ["Cubin", "CubinOrigin", "KernelLoader", "cubin_for", "process_loader"]


class CubinOrigin(enum.StrEnum):
    """Where a cubin came from."""

    CACHE = "cache"
    COMPILER = "compiler"


class Cubin(NamedTuple):
    """A compiled unit."""

    key: str
    """64 hex digits made from all that went into it."""
    image: bytes
    compiler_major: int
    """The major version of the CUDA that compiled it; the driver's must not be lower."""
    origin: CubinOrigin


def cubin_for(
    source: KernelSource, arch: str, cache: CubinCache, options: tuple[str, ...] = OPTIONS
) -> Cubin:
    """The cubin of `source` for `arch`, compiled only where the cache has no sound one.

    Raises:
        CompileError, CompilerVersionError, KernelSourceError, MissingDependencyError: as
            `compile_cubin`.
    """
    compiler = installed_compiler()
    key = cubin_key(source, arch, options, compiler.identity)
    major = compiler.release[0]
    image = cache.get(key)
    if image is not None:
        return Cubin(key, image, major, CubinOrigin.CACHE)
    image = compile_cubin(source, arch, options)
    cache.put(key, image)
    return Cubin(key, image, major, CubinOrigin.COMPILER)


class KernelLoader:
    """Loads each unit once a GPU. Threads may share it."""

    def __init__(self, driver: Driver, cache: CubinCache) -> None:
        """Keep modules for `driver`, with their cubins in `cache`."""
        self.driver = driver
        self.cache = cache
        self._modules: dict[tuple[int, KernelSource], Module] = {}

    def load(self, source: KernelSource, device: int) -> Module:
        """The loaded module of `source` on GPU `device`.

        Raises:
            CompileError, CompilerVersionError, KernelSourceError, MissingDependencyError: as
                `cubin_for`.
            DriverTooOldError: the compiler's CUDA is of a newer major version than the driver's.
            NoDeviceError: there is no such GPU.
        """
        found = self._modules.get((device, source))
        if found is not None:
            return found
        context = self.driver.context(device)
        cubin = cubin_for(source, architecture(context.capability), self.cache)
        module = context.load(cubin.image, cubin.compiler_major)
        kept = self._modules.setdefault((device, source), module)
        if kept is not module:
            module.unload()
        return kept

    def close(self) -> None:
        """Unload every module. No kernel of them may be running or be launched again."""
        while self._modules:
            self._modules.popitem()[1].unload()


@functools.cache
def process_loader() -> KernelLoader:
    """The loader of this process, over its driver and the cache that the environment names.

    Raises:
        ConfigError: KVFERRY_CACHE_DIR is no absolute path.
        CubinCacheError: the folder it names is another user's, or others may write in it.
        MissingDependencyError, NoDeviceError, DriverTooOldError: as `Driver.open`.
    """
    return KernelLoader(Driver.open(), CubinCache.from_environment())

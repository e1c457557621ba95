"""Prepared launches: everything about a kernel call that can be settled beforehand, settled."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from kvferry.errors import LaunchError
from kvferry.kernels.jit.driver import Function

if TYPE_CHECKING:
    from kvferry.errors import DriverError

__all__ = ["MAX_SHARED_BYTES", "PreparedLaunch"]

MAX_SHARED_BYTES = 99 * 1024
"""Static and dynamic shared memory a block may have on every GPU from sm_80 on."""

# More than this must be asked for.
_UNASKED_SHARED_BYTES = 48 * 1024
_MAX_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)

_Dim3 = tuple[int, int, int]


class PreparedLaunch:
    """One kernel with its grid, its block and a block of parameters that is rewritten in place.

    The driver copies the parameters while it is called. So after `launch` returned, they may be
    changed for the next launch, also while the kernel still waits in its stream, and also if the
    launch was captured into a graph. One thread at a time may use it.
    """

    __slots__ = (
        "_addresses",
        "_array",
        "_block",
        "_call",
        "_grid",
        "_handle",
        "_shared_bytes",
        "_success",
        "first",
        "function",
        "parameters",
    )

    def __init__(
        self,
        function: Function,
        parameters: ctypes.Structure,
        *,
        grid: _Dim3,
        block: _Dim3,
        shared_bytes: int = 0,
        first: ctypes.Structure | None = None,
    ) -> None:
        """Lay out a launch.

        Args:
            function: the kernel.
            parameters: a structure with one field for each parameter of the kernel, in order. A
                parameter that is a struct in the kernel is a nested structure here.
            grid: blocks in x, y and z.
            block: threads of a block in x, y and z.
            shared_bytes: dynamic shared memory a block.
            first: the kernel's first parameter, before those of `parameters`, where several
                kernels share one that is large.

        Raises:
            LaunchError: a grid, block or amount of shared memory that the kernel cannot have.
        """
        self.function = function
        self.parameters = parameters
        self._block = block
        self._shared_bytes = shared_bytes
        self.resize(grid)
        threads = block[0] * block[1] * block[2]
        if min(block) < 1 or threads > function.max_threads:
            raise LaunchError(
                f"kernel {function.name}: a block of {_text(block)} is {threads} threads; it can "
                f"have 1 to {function.max_threads}"
            )
        total = function.shared_bytes + shared_bytes
        if shared_bytes < 0 or total > MAX_SHARED_BYTES:
            raise LaunchError(
                f"kernel {function.name}: {function.shared_bytes:,} bytes of static and "
                f"{shared_bytes:,} of dynamic shared memory; together at most {MAX_SHARED_BYTES:,}"
            )
        if total > _UNASKED_SHARED_BYTES:
            function.allow_dynamic_shared(shared_bytes)
        bindings = function.context.driver.bindings
        self._call = bindings.cuLaunchKernel
        self._success = bindings.CUresult.CUDA_SUCCESS
        self._handle = function.handle
        base = ctypes.addressof(parameters)
        names = [field[0] for field in parameters._fields_]
        offsets = [getattr(type(parameters), name).offset for name in names]
        # The array is reached through its address alone, so it must be kept here.
        self.first = first
        addresses = [] if first is None else [ctypes.addressof(first)]
        addresses += [base + offset for offset in offsets]
        self._array = (ctypes.c_void_p * len(addresses))(*addresses)
        self._addresses = ctypes.addressof(self._array)

    @property
    def grid(self) -> _Dim3:
        """Blocks in x, y and z."""
        return self._grid

    def resize(self, grid: _Dim3) -> None:
        """Take another grid from the next launch on; LaunchError for one that cannot be."""
        x, y, z = grid
        if not (1 <= x <= _MAX_GRID[0] and 1 <= y <= _MAX_GRID[1] and 1 <= z <= _MAX_GRID[2]):
            raise LaunchError(
                f"kernel {self.function.name}: a grid of {_text(grid)} blocks; each is 1 to "
                f"{_text(_MAX_GRID)}. For nothing to do, do not launch"
            )
        self._grid = grid

    def launch(self, stream: Any) -> None:
        """Start the kernel in `stream`: its handle as an int, or the bindings' `CUstream`.

        The calling thread's context must be the kernel's (`Context.make_current`).

        Raises:
            LaunchError: the driver refused, or an earlier kernel has failed.
        """
        x, y, z = self._grid
        bx, by, bz = self._block
        (status,) = self._call(
            self._handle, x, y, z, bx, by, bz, self._shared_bytes, stream, self._addresses, 0
        )
        if status is not self._success:
            raise self.refused(status)

    @property
    def function_address(self) -> int:
        """The driver's handle of the kernel, as a number."""
        return int(self._handle)

    @property
    def parameters_address(self) -> int:
        """Where the addresses of the kernel's parameters lie, one after another."""
        return self._addresses

    @property
    def num_threads(self) -> int:
        """Of a block."""
        x, y, z = self._block
        return x * y * z

    @property
    def shared_bytes(self) -> int:
        """Of dynamic shared memory a block."""
        return self._shared_bytes

    def refused(self, status: Any) -> DriverError:
        """What to raise where a launch gave `status`."""
        return self.function.context.driver.error(
            status,
            f"kernel {self.function.name} did not start (grid {_text(self._grid)}, block "
            f"{_text(self._block)}, {self._shared_bytes:,} bytes of dynamic shared memory)",
            LaunchError,
        )


def _text(size: _Dim3) -> str:
    return " x ".join(f"{n:,}" for n in size)

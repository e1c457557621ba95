"""The transfer kernels of one GPU, loaded when first used and launched with prepared arguments."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from kvferry.kernels.copy_config import CopyPath, GroupedConfig
from kvferry.kernels.jit import KernelLoader, KernelSource, Module, PreparedLaunch
from kvferry.kernels.submit_call import LaunchArgs
from kvferry.kernels.transfer_args import SpanArgs, TransferArgs

if TYPE_CHECKING:
    from kvferry.errors import DriverError

__all__ = ["RELAYOUT_BLOCKS", "MoveKernels", "page_work"]

# What the kernels and the arithmetic here must agree on is defined here and told the compiler.
_FLAT_DEPTH = 4
"""Loads that a thread of flat has on the way before its first store."""
_TILE_BYTES = 2048
"""What a warp of realign takes at once."""

RELAYOUT_BLOCKS = 2
"""Blocks of a relayout that a multiprocessor holds at once."""

# As in csrc/transfer.cu: a larger block would leave too few registers for the loads in flight.
_MOVE_THREADS = 512
_FINISH_THREADS = 256
_WARP_THREADS = 32
# kTileRoom of csrc/realign.cuh: a tile, and room to align it.
_TILE_ROOM_BYTES = _TILE_BYTES + 32

_MAX_BLOCKS = 1 << 16
_RELAYOUTS = frozenset({CopyPath.FLAT, CopyPath.REALIGN})


def page_work(path: CopyPath, span: SpanArgs) -> int:
    """How much work a page of `span` is for the kernel of `path`, in the units that it counts."""
    if path is CopyPath.FLAT:
        return int(span.page_lines.divisor)
    if path is CopyPath.REALIGN:
        return -(-int(span.num_bytes) // _TILE_BYTES)
    return int(span.rows_per_page)


def _possible(num_blocks: int) -> int:
    return max(1, min(num_blocks, _MAX_BLOCKS))


def _items(path: CopyPath, work: int) -> int:
    """What `share_out` in csrc/transfer.cuh deals, for `work` over all pages of a span."""
    return -(-work // _FLAT_DEPTH) if path is CopyPath.FLAT else work


def defines(kernel: str, *, relayout: bool = False) -> dict[str, int]:
    """What the compiler is told to make `kernel`: a `CopyPath`'s value or ``finish``.

    `relayout`: between two places on the device, and not over the link.
    """
    return {
        f"KVFERRY_KERNEL_{kernel.upper()}": 1,
        "KVFERRY_FLAT_DEPTH": _FLAT_DEPTH,
        "KVFERRY_TILE_BYTES": _TILE_BYTES,
        "KVFERRY_RESIDENT_BLOCKS": RELAYOUT_BLOCKS if relayout else 1,
    }


class _None(ctypes.Structure):
    """flat and finish take the transfer alone."""

    _fields_ = ()


class _Realign(ctypes.Structure):
    _fields_ = (("digest_only", ctypes.c_uint32),)


class _Grouped(ctypes.Structure):
    _fields_ = (
        ("threads", ctypes.c_uint32),
        ("package", ctypes.c_uint32),
        ("per_thread", ctypes.c_uint32),
    )


class MoveKernels:
    """Launches flat, realign, grouped and finish on one GPU.

    `transfer` is shared by all of them: set its fields, then launch; the driver copies them. One
    thread at a time, with the context current.
    """

    def __init__(self, loader: KernelLoader, device: int) -> None:
        self._loader = loader
        self._device = device
        self._launches: dict[tuple[str, bool, bool], PreparedLaunch] = {}
        self.transfer = TransferArgs()

    def load(self, *paths: CopyPath, relayout: bool = False) -> None:
        """Compile or load what `paths` need, so that the first transfer does not."""
        for path in paths:
            self._prepared(path.value, relayout and path in _RELAYOUTS)
        self._prepared("finish")

    def share_out(self, path: CopyPath, page_work: int) -> None:
        """Tell `transfer` what each of its spans is for `path`; 0: it differs between them."""
        self.transfer.items_per_span = _items(path, page_work * self.transfer.num_pages)

    def flat(self, num_blocks: int, stream: Any, *, relayout: bool = False) -> None:
        """Move the spans of `transfer` in wide packages."""
        self._launch(CopyPath.FLAT.value, num_blocks, stream, relayout)

    def realign(
        self, num_blocks: int, stream: Any, *, digest_only: bool = False, relayout: bool = False
    ) -> None:
        """Move the spans of `transfer` through shared memory, or only add up their digests."""
        self._launch(CopyPath.REALIGN.value, num_blocks, stream, relayout, digest_only)

    def launch_args(
        self,
        path: CopyPath,
        num_blocks: int,
        *,
        relayout: bool,
        first_span: int,
        num_spans: int,
        page_work: int,
    ) -> LaunchArgs:
        """What compiled code is told to launch flat or realign as `flat` and `realign` do here."""
        prepared = self._prepared(path.value, relayout)
        return LaunchArgs(
            function=prepared.function_address,
            parameters=prepared.parameters_address,
            blocks=_possible(num_blocks),
            threads=prepared.num_threads,
            shared_bytes=prepared.shared_bytes,
            first_span=first_span,
            num_spans=num_spans,
            page_work=page_work,
            depth=_FLAT_DEPTH if path is CopyPath.FLAT else 1,
        )

    def refused(self, launch: LaunchArgs, status: Any) -> DriverError:
        """What to raise where compiled code could not carry out `launch`, of `launch_args`."""
        prepared = next(
            one for one in self._launches.values() if one.function_address == launch.function
        )
        prepared.resize((launch.blocks, 1, 1))
        return prepared.refused(status)

    def grouped(self, config: GroupedConfig, num_blocks: int, stream: Any) -> None:
        """Move the spans of `transfer` element by element; its digests need `realign` after it."""
        parameters = self._prepared(CopyPath.GROUPED.value).parameters
        parameters.threads = config.threads
        parameters.package = config.package
        parameters.per_thread = config.packages_per_thread
        self._launch(CopyPath.GROUPED.value, num_blocks, stream)

    def finish(self, num_digests: int, stream: Any) -> None:
        """Turn the sums of all spans of `transfer` into digests: write them or compare."""
        self._launch("finish", -(-num_digests // _FINISH_THREADS), stream)

    def _launch(
        self,
        name: str,
        num_blocks: int,
        stream: Any,
        relayout: bool = False,
        digest_only: bool = False,
    ) -> None:
        prepared = self._prepared(name, relayout, digest_only)
        prepared.resize((_possible(num_blocks), 1, 1))
        prepared.launch(stream)

    def _prepared(
        self, name: str, relayout: bool = False, digest_only: bool = False
    ) -> PreparedLaunch:
        found = self._launches.get((name, relayout, digest_only))
        if found is not None:
            return found
        function = self._module(name, relayout).function(f"kvferry_{name}")
        threads = _FINISH_THREADS if name == "finish" else _MOVE_THREADS
        shared = threads // _WARP_THREADS * _TILE_ROOM_BYTES if name == "realign" else 0
        kinds = {CopyPath.REALIGN.value: _Realign, CopyPath.GROUPED.value: _Grouped}
        prepared = PreparedLaunch(
            function,
            kinds.get(name, _None)(),
            grid=(1, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=shared,
            first=self.transfer,
        )
        if digest_only:
            prepared.parameters.digest_only = 1
        self._launches[name, relayout, digest_only] = prepared
        return prepared

    def _module(self, name: str, relayout: bool) -> Module:
        source = KernelSource.packaged("transfer.cu", defines(name, relayout=relayout))
        return self._loader.load(source, self._device)

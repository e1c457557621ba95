"""The device's table of spans for one kind of plan, and in which launches it is gone through."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

from kvferry.errors import DriverError
from kvferry.kernels import CopyPath, page_work, pages_per_launch
from kvferry.kernels.jit import Context, DeviceBuffer, Stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.kernels import GroupedConfig, SpanArgs

__all__ = ["Carried", "Launch", "SpanTable", "layer_groups"]


class Carried(NamedTuple):
    """One span as the kernels see it, and which kernel carries it."""

    model_layer: int
    path: CopyPath
    grouped: GroupedConfig | None
    args: SpanArgs


class Launch(NamedTuple):
    """Neighbouring spans that one kernel carries."""

    path: CopyPath
    grouped: GroupedConfig | None
    first: int
    num_spans: int
    ends_layers: tuple[int, ...]
    """The model layers that are complete after this launch."""

    page_work: int
    """`page_work` of each span, where all have the same; else 0."""

    host_run: int
    """The shortest run of bytes on the host."""


class SpanTable:
    """Spans in the order they move, in device memory, with their launches."""

    def __init__(self, context: Context, carried: Sequence[Carried], stream: Stream) -> None:
        """Bring the table to the device in `stream`, which should be idle: it is waited for."""
        ordered, self.launches = _in_groups(carried)
        self.num_spans = len(ordered)
        self.max_pages = pages_per_launch([one.args for one in ordered])
        self.paths = tuple(dict.fromkeys(one.path for one in ordered))
        array = (type(ordered[0].args) * len(ordered))(*(one.args for one in ordered))
        self._buffer = DeviceBuffer(context, ctypes.sizeof(array))
        self.address = self._buffer.address
        # Not a plain copy: that would wait for all that the caller's default stream holds.
        try:
            stream.copy_in(self.address, ctypes.addressof(array), ctypes.sizeof(array))
            stream.drain()
        except DriverError:
            self._buffer.close()
            raise

    @property
    def path(self) -> str:
        """The kernels that carry the plan, for people."""
        return "+".join(path.value for path in self.paths)

    def close(self) -> None:
        """Free the table; no transfer may use it any more."""
        self._buffer.close()


def layer_groups(layers: Sequence[int]) -> Iterator[Sequence[int]]:
    """Groups of 1, 1, 2, 4, 8 … `layers`: the first are ready early, the rest in few launches."""
    first, size = 0, 1
    while first < len(layers):
        yield layers[first : first + size]
        first += size
        size = max(1, first)


def _in_groups(carried: Sequence[Carried]) -> tuple[list[Carried], tuple[Launch, ...]]:
    layers = sorted({one.model_layer for one in carried})
    ordered: list[Carried] = []
    launches: list[Launch] = []
    for group in layer_groups(layers):
        members = [one for one in carried if one.model_layer in group]
        kinds = dict.fromkeys((one.path, one.grouped) for one in members)
        for kind in kinds:
            same = [one for one in members if (one.path, one.grouped) == kind]
            host_run = min(int(one.args.host.run_bytes) for one in same)
            launches.append(
                Launch(*kind, len(ordered), len(same), (), _shared_work(same), host_run)
            )
            ordered += same
        launches[-1] = launches[-1]._replace(ends_layers=tuple(group))
    return ordered, tuple(launches)


def _shared_work(carried: Sequence[Carried]) -> int:
    found = {page_work(one.path, one.args) for one in carried}
    return found.pop() if len(found) == 1 else 0

"""The device's table of spans for one kind of plan, and in which launches it is gone through."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

from kvferry.kernels import CopyPath, page_work, pages_per_launch
from kvferry.kernels.jit import Context, DeviceBuffer, Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.kernels import GroupedConfig, SpanArgs

__all__ = ["Carried", "Launch", "SpanTable", "Step"]


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
    page_work: int
    """`page_work` of each span, where all have the same; else 0."""

    host_run: int
    """The shortest run of bytes on the host."""


class Step(NamedTuple):
    """Model layers that are complete together."""

    layers: tuple[int, ...]
    launches: tuple[Launch, ...]


class SpanTable:
    """Spans in the order they move, in device memory, with their steps."""

    def __init__(
        self, context: Context, steps: Sequence[Sequence[Carried]], stream: Stream
    ) -> None:
        """Bring the table to the device in `stream`, which should be idle: it is waited for."""
        ordered: list[Carried] = []
        self.steps = tuple(_step(members, ordered) for members in steps)
        self.num_spans = len(ordered)
        self.max_pages = pages_per_launch([one.args for one in ordered])
        self.paths = frozenset(one.path for one in ordered)
        self.has_grouped = CopyPath.GROUPED in self.paths
        """Whether some are launched from Python alone: grouped ones, which are there to compare."""

        self.path = "+".join(path.value for path in CopyPath if path in self.paths)
        """The kernels that carry the plan, for people."""

        array = (type(ordered[0].args) * len(ordered))(*(one.args for one in ordered))
        self._buffer = DeviceBuffer(context, ctypes.sizeof(array))
        self.address = self._buffer.address
        # Not a plain copy: that would wait for all that the caller's default stream holds.
        try:
            stream.copy_in(self.address, ctypes.addressof(array), ctypes.sizeof(array))
            stream.drain()
        except BaseException:
            self._buffer.close()
            raise

    def close(self) -> None:
        """Free the table; no transfer may use it any more."""
        self._buffer.close()


def _step(members: Sequence[Carried], ordered: list[Carried]) -> Step:
    """The launches for `members`, which are put behind `ordered`."""
    launches = []
    for kind in dict.fromkeys((one.path, one.grouped) for one in members):
        same = [one for one in members if (one.path, one.grouped) == kind]
        work = {page_work(one.path, one.args) for one in same}
        launches.append(
            Launch(
                *kind,
                first=len(ordered),
                num_spans=len(same),
                page_work=work.pop() if len(work) == 1 else 0,
                host_run=min(int(one.args.host.run_bytes) for one in same),
            )
        )
        ordered += same
    layers = tuple(sorted({one.model_layer for one in members}))
    return Step(layers, tuple(launches))

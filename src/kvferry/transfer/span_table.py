"""The device's table of spans for one kind of plan, and in which launches it is gone through."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

from kvferry.kernels.copy_config import CopyPath
from kvferry.kernels.jit import Context, DeviceBuffer

if TYPE_CHECKING:
    from kvferry.kernels.copy_config import GroupedConfig
    from kvferry.kernels.transfer_args import SpanArgs

__all__ = ["Carried", "Launch", "SpanTable"]


class Carried(NamedTuple):
    """One span as the kernels see it, and which kernel carries it."""

    model_layer: int
    path: CopyPath
    grouped: GroupedConfig | None
    args: SpanArgs


class Launch(NamedTuple):
    """Neighbouring spans of one layer that one kernel carries."""

    path: CopyPath
    grouped: GroupedConfig | None
    first: int
    count: int
    largest_span_bytes: int
    ends_layer: int | None
    """The model layer that is complete after this launch."""


class SpanTable:
    """Spans in the order they move, in device memory, with their launches."""

    def __init__(self, context: Context, carried: list[Carried]) -> None:
        ordered = sorted(carried, key=lambda one: (one.model_layer, one.path.value))
        self.launches = _launches(ordered)
        self.num_spans = len(ordered)
        self.paths = tuple(dict.fromkeys(one.path for one in ordered))
        array = (type(ordered[0].args) * len(ordered))(*(one.args for one in ordered))
        self._buffer = DeviceBuffer(context, ctypes.sizeof(array))
        self.address = self._buffer.address
        context.driver.call(
            "cuMemcpyHtoD", self.address, ctypes.addressof(array), ctypes.sizeof(array)
        )

    @property
    def path(self) -> str:
        """The kernels that carry the plan, for people."""
        return "+".join(path.value for path in self.paths)

    def close(self) -> None:
        """Free the table; no transfer may use it any more."""
        self._buffer.close()


def _launches(ordered: list[Carried]) -> tuple[Launch, ...]:
    launches: list[Launch] = []
    first = 0
    for index, one in enumerate(ordered):
        after = ordered[index + 1] if index + 1 < len(ordered) else None
        same_layer = after is not None and after.model_layer == one.model_layer
        if after is not None and same_layer and (after.path, after.grouped) == one[1:3]:
            continue
        launches.append(
            Launch(
                path=one.path,
                grouped=one.grouped,
                first=first,
                count=index + 1 - first,
                largest_span_bytes=max(int(o.args.num_bytes) for o in ordered[first : index + 1]),
                ends_layer=None if same_layer else one.model_layer,
            )
        )
        first = index + 1
    return tuple(launches)

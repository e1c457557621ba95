"""The direct mover where there is no GPU: what it would tell kernels, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.memory.fake_pins import FakePins

from kvferry.errors import PlanError
from kvferry.geometry import Geometry, LayerView, Plane, PoolView
from kvferry.kernels import CopyPath
from kvferry.memory import HostPool, RegisteredHostPool, SlotOwner
from kvferry.transfer import TransferPlan, gpu_carrier, in_flight, movers, span_tables
from kvferry.transfer.gpu_carrier import GpuCarrier
from kvferry.transfer.gpu_options import GpuOptions
from kvferry.transfer.profile import BUILT_IN
from kvferry.transfer.span_table import Carried

_SHIFT = 64 << 40
_PLANES = (
    Plane(name="latent", num_layers=3, element_size=656),
    Plane(name="index_key", num_layers=2, element_size=131, layer_ids=(0, 2)),
)
_GEOMETRY = Geometry(planes=_PLANES, page_size=16)
_NUM_SLOTS = 40


class _Table:
    """Stands in for the table of spans in device memory: keeps what it was made from."""

    max_pages = 1
    path = "no kernel"
    has_grouped = False
    num_spans = 5

    def __init__(self, _: Any, steps: Sequence[Sequence[Carried]], __: Any) -> None:
        self.carried = [one for step in steps for one in step]


def _on_gpu() -> PoolView:
    """A device pool at addresses that no host pool is near."""
    layers = {
        plane.name: tuple(
            LayerView(
                address=(number + 1 << 44) + (layer << 32),
                num_rows=1024,
                row_stride=plane.element_size,
                block_rows=1024,
                block_stride=1024 * plane.element_size,
                num_pieces=1,
                piece_size=plane.element_size,
                piece_stride=plane.element_size,
                device="cuda:0",
            )
            for layer in range(plane.num_layers)
        )
        for number, plane in enumerate(_PLANES)
    }
    return PoolView(_GEOMETRY, layers)


def _own_pool() -> HostPool:
    pool = HostPool(_GEOMETRY, num_slots=_NUM_SLOTS)
    assert pool.allocate(_NUM_SLOTS, SlotOwner.INDEX) is not None
    return pool


def _engine_pool() -> RegisteredHostPool:
    tensors = {
        plane.name: np.zeros((plane.num_layers, _NUM_SLOTS * 16, plane.element_size), np.uint8)
        for plane in _PLANES
    }
    return RegisteredHostPool.from_tensors(_GEOMETRY, tensors)


def _submit(
    monkeypatch: pytest.MonkeyPatch, host: HostPool | RegisteredHostPool, pins: FakePins, path: str
) -> Sequence[Carried]:
    """What kernels would be told of `host`, which `pins` registers.

    The plan has a page more than its table takes, so that it ends where kernels would begin.
    """
    options = {} if isinstance(host, HostPool) else {"pin_tensors": True}
    monkeypatch.setattr(type(host), "pin_for", lambda pool, _: pool.pin(pins, **options))
    doubles = {
        name: mock.MagicMock()
        for name in ("CommandBuffers", "Event", "MoveKernels", "SpanLauncher", "Stream")
    }
    tables: list[_Table] = []

    def table(*given: Any) -> _Table:
        tables.append(_Table(*given))
        return tables[-1]

    for name, double in doubles.items():
        monkeypatch.setattr(gpu_carrier, name, double)
    monkeypatch.setattr(in_flight, "Event", doubles["Event"])
    monkeypatch.setattr(movers, "Stream", doubles["Stream"])
    monkeypatch.setattr(span_tables, "SpanTable", table)
    loader = mock.MagicMock()
    loader.driver.context.return_value.is_capturing.return_value = False
    chosen = GpuOptions(verify=True, path=CopyPath(path), why_not_staged="a test", profile=BUILT_IN)
    carrier = GpuCarrier(_on_gpu(), host, loader, chosen)
    plan = TransferPlan.load(_GEOMETRY, host_slots=[7, 0], device_slots=np.arange(32))
    with pytest.raises(
        PlanError, match=r"2 pages in one transfer; kernels take 1 .* split the plan"
    ):
        carrier.submit(plan, 0)
    for name, method in (
        ("CommandBuffers", "take"),
        ("Event", "record"),
        ("SpanLauncher", "begin"),
    ):
        getattr(doubles[name].return_value, method).assert_not_called()
    return tables[0].carried


@pytest.mark.parametrize("path", ["flat", "realign"])
@pytest.mark.parametrize("make", [_own_pool, _engine_pool])
def test_kernels_get_the_gpu_s_addresses(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], HostPool | RegisteredHostPool], path: str
) -> None:
    """Pages and digests of every span are where the GPU has them, 64 TiB above the host's."""
    host, pins = make(), FakePins(shift=_SHIFT)
    carried = _submit(monkeypatch, host, pins, path)
    first = host.digests.ctypes.data
    expected = {
        (
            host.view.view(span.plane.name, span.layer).address + _SHIFT,
            first + host.digests.itemsize * span.index + _SHIFT,
        )
        for span in _GEOMETRY.spans()
    }
    assert len(expected) == 5
    assert {(one.args.host.base, one.args.digests) for one in carried} == expected
    host.close()
    assert pins.pinned == {}


def test_more_pages_than_kernels_take_are_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is enqueued, and the pool is not kept from closing."""
    host = _own_pool()
    assert len(_submit(monkeypatch, host, FakePins(), "flat")) == _Table.num_spans
    host.close()

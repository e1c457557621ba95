"""The order of a write-back through two rooms of staging, and what is under way when one fails."""

from __future__ import annotations

from typing import Any

import pytest
from tests.adapters.sglang.fake_world import KINDS, LAYERS, ROWS, World
from tests.adapters.sglang.hicache_rig import Plane, Rows, scattered
from tests.transfer.fake_gpu import Status

import kvferry.adapters.sglang as adapter
from kvferry.adapters.sglang.row_tensors import gpu_at
from kvferry.errors import DriverError

_SIZE, _PAGE, _STAGING = 128, 8, 16


class _WriteBack:
    """One of 64 rows through two rooms of eight, with everything that it needs made before."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plane: Plane = world.plane(_SIZE, token_major=True)
        self.rows: tuple[Rows, Rows] = (
            scattered(5, 64, ROWS[0], _PAGE),
            scattered(6, 64, ROWS[1], _PAGE),
        )
        self.expected = self.plane.after(False, *self.rows, range(LAYERS))
        before = self.plane.host.inside.clone()
        self.staging = world.on_device(_STAGING * LAYERS * _SIZE).view(_STAGING, LAYERS, _SIZE)
        self.table = world.table(self.plane.device_tensors)
        self.lists = world.rows(self.rows[0], KINDS[1]), world.rows(self.rows[1], KINDS[3])
        world.stream = world.gpu.new_stream()
        self.submit()
        self.plane.check(self.expected, "the first time")
        self.plane.host.inside.copy_(before)

    def submit(self) -> None:
        adapter.transfer_hicache_all_layer_mla_staged_lf_pf(
            self.table, *self.lists, self.staging, self.plane.host_tensor, page_size=_PAGE
        )

    def in_any_order(self, seed: int) -> None:
        """Carried out one entry at a time, from any stream that may go on."""
        self.world.gpu.hold_all()
        self.submit()
        self.world.gpu.interleave(seed)
        self.world.gpu.release()


@pytest.mark.parametrize("seed", range(30))
def test_bytes_are_right_in_every_order_of_the_streams(world: World, seed: int) -> None:
    """Kernels and copies take turns at each room, whichever stream is ahead."""
    write_back = _WriteBack(world)
    write_back.in_any_order(seed)
    write_back.plane.check(write_back.expected, f"seed {seed}")


class _NoEvent:
    """What an event is not: it holds nobody back."""

    def __init__(self, event: Any) -> None:
        self.record, self.close = event.record, event.close

    def block(self, stream: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize("events", ["_laid_out", "_copied"])
def test_without_one_of_the_events_bytes_are_wrong(world: World, events: str) -> None:
    """The control: either side of a room that does not wait is seen."""
    write_back = _WriteBack(world)
    rooms = gpu_at(0).mover._rooms
    setattr(rooms, events, [_NoEvent(one) for one in getattr(rooms, events)])
    wrong = 0
    for seed in range(30):
        write_back.in_any_order(seed)
        try:
            write_back.plane.check(write_back.expected, "control")
        except AssertionError:
            wrong += 1
    assert wrong


def test_copies_run_beside_kernels(world: World) -> None:
    """With the copies held back, the kernels of both rooms are through, and no third."""
    write_back = _WriteBack(world)
    gpu = world.gpu
    aside = int(gpu_at(0).mover._rooms._aside.handle)

    def over() -> int:
        return sum(bool(work.blocks) for work in gpu.time.done)

    before = over()
    with gpu.held(aside):
        write_back.submit()
        assert over() - before == 2
        assert gpu.num_pending(world.stream) > 0
    assert over() - before == 64 // (_STAGING // 2)
    write_back.plane.check(write_back.expected, "released")


def test_what_a_failed_write_back_began_is_before_what_comes_next(world: World) -> None:
    """The second copy is refused: the caller's stream waits for the first, which reads staging."""
    write_back = _WriteBack(world)
    gpu = world.gpu
    aside = int(gpu_at(0).mover._rooms._aside.handle)
    later, copies = list[int](), list[int]()

    def second(*_: Any) -> bool:
        copies.append(1)
        return len(copies) == 2

    with gpu.held(aside):
        with (
            gpu.failing("cuMemcpyDtoHAsync", Status.CUDA_ERROR_LAUNCH_FAILED, when=second),
            pytest.raises(DriverError),
        ):
            write_back.submit()
        gpu.enqueue(world.stream, lambda: later.append(1))
        assert not later
    assert later == [1]

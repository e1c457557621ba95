"""Copies between host pages and staging: every byte, and no part over the border of a chunk."""

from __future__ import annotations

import bisect
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.transfer.conftest import only_staged
from tests.transfer.fake_gpu import FakeGpu

from kvferry.kernels.jit import (
    Context,
    DeviceBuffer,
    Driver,
    PieceCopy,
    PinnedBuffer,
    RowCopy,
    Stream,
)
from kvferry.testing import assert_bytes_equal, memory_at
from kvferry.transfer import host_copies
from kvferry.transfer.host_copies import HostCopies
from kvferry.transfer.staging import Band, Group, Piece, Place, run_table, runs_of
from kvferry.types import Direction

_NUM_SLOTS = 9


class _Chunks:
    """Registrations of a host pool that end at these addresses."""

    def __init__(self, ends: list[int]) -> None:
        self.ends = ends

    def number(self, address: int) -> int:
        """Which registration an address is in."""
        return bisect.bisect_right(self.ends, address)

    def chunk_of(self, address: int) -> SimpleNamespace:
        """As the pinned addresses of a pool have it."""
        return SimpleNamespace(end=self.ends[self.number(address)])


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where on the host each row of each copy begins, and its width."""
    found: list[tuple[int, int]] = []
    rows, pieces = RowCopy.submit, PieceCopy.submit

    def row_copy(self: RowCopy, stream: Stream, host: int, host_pitch: int, *rest: int) -> None:
        found.extend((host + row * host_pitch, rest[2]) for row in range(rest[3]))
        rows(self, stream, host, host_pitch, *rest)

    def piece_copy(self: PieceCopy, stream: Stream, *told: Any) -> None:
        targets, sources, sizes = (side.ravel().tolist() for side in told)
        on_host = {True: sources, False: targets}[self.__dict__["to_device"]]
        found.extend(zip(on_host, sizes, strict=True))
        pieces(self, stream, *told)

    monkeypatch.setattr(RowCopy, "submit", row_copy)
    monkeypatch.setattr(PieceCopy, "submit", piece_copy)
    return found


def _bands(rng: random.Random, base: int, pitch: int) -> tuple[Band, ...]:
    """One to three of a slot of `pitch` bytes, apart on both sides."""
    cuts = sorted(rng.sample(range(pitch + 1), 2 * rng.randint(1, 3)))
    bands, at = [], 0
    for begin, end in zip(cuts[::2], cuts[1::2], strict=True):
        bands.append(Band(Place(base + begin, pitch), end - begin, at))
        at += end - begin + rng.randint(0, 5)
    return tuple(bands)


@only_staged
@pytest.mark.parametrize("one_call", [False, True], ids=["runs", "pages"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("seed", range(100))
def test_random_pieces_over_random_borders(
    gpu: FakeGpu, parts: list[tuple[int, int]], direction: Direction, one_call: bool, seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Some pages of a plan, in any runs: exactly their bytes on the side they go to, and each part
    in one chunk, however many borders there are."""
    monkeypatch.setattr(host_copies, "wants_one_call", lambda calls, _: one_call and calls > 1)
    rng = random.Random(seed)
    context: Context = Driver(gpu, "13.0.0").context(0)
    with context.current():
        pitch = rng.randint(30, 60)
        pool, staging = PinnedBuffer(context, 1024), DeviceBuffer(context, 2048)
        host, device = memory_at(pool.address, 1024), memory_at(staging.address, 2048)
        noise = np.random.default_rng(seed)
        for side in (host, device):
            side[:] = noise.integers(0, 256, side.size, dtype=np.uint8)
        bands = _bands(rng, pool.address + rng.randint(0, 50), pitch)
        group = Group((), (), bands, (), bands[-1].in_staging + bands[-1].width + rng.randint(0, 9))
        slots = np.array(rng.sample(range(_NUM_SLOTS), rng.randint(3, _NUM_SLOTS)))
        if rng.random() < 0.5:
            slots.sort()
        first = rng.randrange(3)
        piece = Piece(0, first, rng.randint(1, len(slots) - first), False)
        inside = rng.sample(range(1, 600), rng.choice((1, 1, 5, 60)))
        chunks = _Chunks([*sorted(pool.address + at for at in inside), pool.address + 1024])
        copies = HostCopies(context, chunks)  # type: ignore[arg-type]
        if copies.pieces is not None:
            copies.pieces.__dict__["to_device"] = direction is Direction.LOAD
        expected = [host.copy(), device.copy()]
        for page, slot in enumerate(slots[first : first + piece.num_pages].tolist()):
            for (address, _), width, in_staging in bands:
                at = address - pool.address + slot * pitch
                there = 64 + page * group.pitch + in_staging
                if direction is Direction.LOAD:
                    expected[1][there : there + width] = host[at : at + width]
                else:
                    expected[0][at : at + width] = device[there : there + width]
        plan: Any = SimpleNamespace(
            direction=direction, host_slots=slots, host_runs=runs_of(run_table(slots))
        )
        copies.of(plan, Stream(context)).submit(piece, group, staging.address + 64)
        assert_bytes_equal(host, expected[0], "the host")
        assert_bytes_equal(device, expected[1], "staging")
        assert sum(width for _, width in parts) == piece.num_pages * group.width
        assert all(chunks.number(at) == chunks.number(at + width - 1) for at, width in parts)
        pool.close()
        staging.close()

"""Transfers and pools as large as in production: many pages at once, and offsets beyond 32 bits."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gpu_rig import DEVICE, GpuRig, Rows, latent, owned_pool, random_bytes

from kvferry import PoolView, TransferEngine, TransferPlan

pytestmark = pytest.mark.gpu

_SIZE = 576
_PAGE = 64
_ROUNDS = 20
_LONG_ROUNDS = 5
_GIB = 1 << 30


def _free_host_bytes() -> int:
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) << 10
    return 0


class _Pools:
    """Rows of random bytes, a poisoned copy of them to load into, and host slots."""

    def __init__(self, make_rig: Callable[..., GpuRig], num_layers: int, pages: int) -> None:
        self.pages = pages
        self.num_rows = (pages + pages // 8 + 1) * _PAGE
        geometry = latent(_SIZE, num_layers)
        self.rig = make_rig(geometry, num_rows=self.num_rows, num_slots=pages + 2)
        self.rig.fill(1)
        self.target = torch.full_like(self.rig.tensor, 0xA5)
        view = PoolView.from_tensors(geometry, {"latent": self.target})
        self.writer = self.rig.engine()
        self.reader = TransferEngine(view, self.rig.host)

    def plan_arguments(self, rng: np.random.Generator, count: int) -> dict[str, Any]:
        """`count` pages: random slots, and rows in no order."""
        rows = rng.permutation(self.num_rows)[: count * _PAGE].reshape(count, _PAGE)
        return {
            "host_slots": rng.permutation(self.rig.num_slots)[:count],
            "device_slots": rows,
            "page_keys": [b"%d" % page for page in range(count)],
        }

    def move(self, rng: np.random.Generator, count: int) -> None:
        """Store `count` pages, load them into the copy, and compare host and copy whole."""
        geometry, given = self.rig.geometry, self.plan_arguments(rng, count)
        before = self._on_host()
        stored = self.writer.store(TransferPlan.store(geometry, **given))
        stored.wait()
        assert stored.verified_pages == count
        at = torch.from_numpy(given["device_slots"].reshape(-1)).to(DEVICE)
        slots = torch.from_numpy(given["host_slots"]).to(DEVICE)
        moved = self.rig.tensor[:, at]
        pages = moved.reshape(len(moved), count, _PAGE * _SIZE).transpose(0, 1)
        before[slots] = pages.reshape(count, len(moved) * _PAGE * _SIZE)
        assert torch.equal(self._on_host(), before)
        self.target.fill_(0xA5)
        loaded = self.reader.load(TransferPlan.load(geometry, **given))
        loaded.wait()
        assert loaded.verified_pages == count
        torch.cuda.synchronize()
        expected = torch.full_like(self.target, 0xA5)
        expected[:, at] = moved
        assert torch.equal(self.target, expected)

    def _on_host(self) -> torch.Tensor:
        """All slots, on the GPU: such rows leave no padding. Shape ``[slots, slot_bytes]``."""
        return torch.from_numpy(self.rig.slot_memory()).to(DEVICE)


@pytest.mark.parametrize("num_layers", [61, 78])
def test_many_pages_then_one_then_none(make_rig: Callable[..., GpuRig], num_layers: int) -> None:
    """200 pages of 576-byte rows, then one, then none, over and over with new page lists."""
    pools = _Pools(make_rig, num_layers, 200)
    images = pools.rig.images()
    rng = np.random.default_rng(num_layers)
    for _ in range(_ROUNDS):
        for count in (200, 1, 0):
            pools.move(rng, count)
    pools.reader.close()
    pools.rig.check_device(images)


def test_two_thousand_pages_at_once(make_rig: Callable[..., GpuRig]) -> None:
    """131,072 tokens of 61 layers, 4.6 GB, in one call each way."""
    if _free_host_bytes() < 16 * _GIB:
        pytest.skip("needs 16 GiB of free host memory")
    pools = _Pools(make_rig, 61, 2048)
    pools.move(np.random.default_rng(3), 2048)
    pools.reader.close()


@pytest.mark.soak
@pytest.mark.parametrize("num_layers", [61, 78])
def test_long_write_backs_through_little_staging(
    make_rig: Callable[..., GpuRig], num_layers: int, soak_factor: int
) -> None:
    """2,048 pages in one call, then one, then none, with room for 7 pages in staging."""
    count = 2048
    if _free_host_bytes() < 16 * _GIB:
        pytest.skip("needs 16 GiB of free host memory")
    rig = make_rig(latent(_SIZE, num_layers), num_rows=(count + 1) * _PAGE, num_slots=count + 2)
    slot_bytes = rig.geometry.slot_bytes()
    engine = rig.engine(staging_bytes=14 * slot_bytes)
    rng = np.random.default_rng(num_layers)
    rig.fill(1)
    image = rig.tensor.clone()
    for _ in range(_LONG_ROUNDS * soak_factor):
        for pages in (count, 1, 0):
            slots = rng.permutation(rig.num_slots)[:pages]
            rows = rng.permutation(rig.tensor.shape[1])[: pages * _PAGE].reshape(pages, _PAGE)
            given: dict[str, Any] = {"host_slots": slots, "device_slots": rows}
            stored = engine.store(TransferPlan.store(rig.geometry, **given))
            stored.wait()
            loaded = engine.load(TransferPlan.load(rig.geometry, **given))
            loaded.wait()
            assert (stored.verified_pages, loaded.verified_pages) == (pages, pages)
    rig.check_device({"latent": image})  # what came back is what went, and nothing else moved


@pytest.mark.parametrize("path", ["flat", "realign", "grouped"])
def test_offsets_beyond_32_bits(path: str) -> None:
    """In a pool of 4.5 GiB, exactly the rows that are named move, around 2^31 and 2^32 bytes."""
    num_rows = (9 * _GIB // 2) // _SIZE
    geometry = latent(_SIZE, num_layers=1)
    tensor = torch.full((1, num_rows, _SIZE), 0xA5, dtype=torch.uint8, device=DEVICE)
    borders = [edge // _SIZE for edge in (2**31, 2**32)]
    near: Rows = np.concatenate(
        [np.arange(border - _PAGE, border + _PAGE, dtype=np.int64) for border in borders]
        + [np.arange(num_rows - _PAGE, num_rows, dtype=np.int64)]
    )
    rng = np.random.default_rng(5)
    rows = rng.permutation(near).reshape(-1, _PAGE)
    data = random_bytes(4, near.size, _SIZE)
    at = torch.from_numpy(rows.reshape(-1)).to(DEVICE)
    tensor[0, at] = data
    pages = len(rows)
    # The same rows as neighbours too, where the path takes runs.
    for given in (rows, near.reshape(-1, _PAGE)):
        with (
            owned_pool(geometry, pages) as pool,
            TransferEngine(
                PoolView.from_tensors(geometry, {"latent": tensor}), pool, path=path
            ) as engine,
        ):
            before = tensor[0, at].clone()
            slots = np.arange(pages)
            plan = TransferPlan.store(geometry, host_slots=slots, device_slots=given)
            engine.store(plan).wait()
            tensor[0, at] = 0xA5
            torch.cuda.synchronize()
            plan = TransferPlan.load(geometry, host_slots=slots, device_slots=given)
            handle = engine.load(plan)
            handle.wait()
            assert handle.verified_pages == pages
            assert torch.equal(tensor[0, at], before)
    tensor[0, at] = 0xA5
    assert bool((tensor == 0xA5).all()), "a row that nobody named was written"

"""What the GPU benchmarks share: pools, plans, the clock, M, and what a result is told with.

M is the best plain pinned copy of 1 GiB a direction, in GB/s (10^9 bytes a second), of the same
run. Nothing here loads torch before it is called: `--help` works anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from kvferry import (
        Geometry,
        HostPool,
        RegisteredHostPool,
        TransferEngine,
        TransferHandle,
        TransferPlan,
    )

PAGE_SIZE = 64
DEVICE = "cuda:0"
POISON = 0xA5

_GIB = 1 << 30
# The sleeping kernel counts clocks of a multiprocessor: GPUs run at 2 GHz at most, so that a sleep
# is never shorter than asked for.
_CLOCKS_PER_SEC = 2e9
_SHORTEST_SLEEP_SECS, _LONGEST_SLEEP_SECS = 1e-3, 0.2
_RETRIES = 3


class Timing(NamedTuple):
    """What one piece of work takes of the GPU."""

    seconds: float
    """The median."""

    num_exposed: int
    """In how many repeats the CPU's time to submit is part of it."""


class Pools(NamedTuple):
    """Pools of one geometry and host layout: what is stored, where it is loaded to, and between."""

    geometry: Geometry
    host: HostPool | RegisteredHostPool
    source: torch.Tensor
    """Random bytes, shape ``[layers, tokens, element_size]``."""

    target: torch.Tensor
    """Of the same shape; poisoned."""

    @property
    def num_pages(self) -> int:
        """As many as all of `source`."""
        return int(self.source.shape[1]) // PAGE_SIZE

    @property
    def num_bytes(self) -> int:
        """The payload of all pages."""
        return int(self.source.numel())


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    made = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    made.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures there")
    return made


def begin() -> dict[str, float]:
    """Look for the GPU, measure M, and print the machine; what is returned is M."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("there is no GPU here that torch can use")
    link = measure_link()
    told = machine()
    print(
        f"{told['gpu']}, torch {told['torch']}, CUDA {told['cuda']}, Python {told['python']}\n"
        f"{' '.join(sys.argv)}\n"
        f"M: H2D {link['h2d']:.1f}, D2H {link['d2h']:.1f} GB/s",
        flush=True,
    )
    return link


def write(
    file: pathlib.Path | None, link: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
) -> None:
    """The results as JSON; None: nowhere."""
    if file is None:
        return
    told = {
        "command": " ".join(sys.argv),
        "machine": machine(),
        "link": dict(link),
        "unit": "GB/s",
        "rows": list(rows),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(told, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What a figure must be read with."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(0),
        "capability": list(torch.cuda.get_device_capability(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def measure_link(num_bytes: int = _GIB) -> dict[str, float]:
    """The best plain pinned copy of `num_bytes` each way, GB/s: M."""
    import torch

    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = random_bytes(1, num_bytes)
    found = {}
    for name, target, source in (("d2h", host, device), ("h2d", device, host)):
        best = float("inf")
        for _ in range(7):
            started, ended = timed_event(), timed_event()
            started.record()
            target.copy_(source, non_blocking=True)
            ended.record()
            ended.synchronize()
            best = min(best, started.elapsed_time(ended) / 1e3)
        found[name] = round(num_bytes / best / 1e9, 2)
    return found


# ------------------------------------------------------------------------------ pools and plans


def latent(element_size: int, num_layers: int) -> Geometry:
    """One plane of `element_size` bytes a token and layer, in pages of 64 tokens."""
    from kvferry import Geometry, Plane

    plane = Plane(name="latent", num_layers=num_layers, element_size=element_size)
    return Geometry(planes=(plane,), page_size=PAGE_SIZE)


def pages_of(num_bytes: float, page_bytes: int, multiple: int = 1) -> int:
    """How many pages come closest to `num_bytes`, as a multiple of `multiple`, at least one."""
    return max(1, round(num_bytes / page_bytes / multiple)) * multiple


def random_bytes(seed: int, *shape: int) -> torch.Tensor:
    """Random bytes on the GPU."""
    import torch

    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=generator)


@contextlib.contextmanager
def pools(geometry: Geometry, num_pages: int, host_layout: str = "page_major") -> Iterator[Pools]:
    """Pools of one plane, on either side as large as `num_pages` pages."""
    import torch

    (plane,) = geometry.planes
    source = random_bytes(1, plane.num_layers, num_pages * PAGE_SIZE, plane.element_size)
    target = torch.full_like(source, POISON)
    host = _host_pool(geometry, host_layout, num_pages)
    try:
        yield Pools(geometry, host, source, target)
    finally:
        torch.cuda.synchronize()
        host.close()


def _host_pool(geometry: Geometry, layout: str, num_pages: int) -> HostPool | RegisteredHostPool:
    from kvferry import HostPool, RegisteredHostPool, SlotOwner

    if layout == "page_major":
        owned = HostPool(geometry, num_slots=num_pages)
        owned.allocate(num_pages, SlotOwner.INDEX)
        return owned
    import torch

    (plane,) = geometry.planes
    tokens, layers, size = num_pages * PAGE_SIZE, plane.num_layers, plane.element_size
    token_major = layout == "token_major"
    shape = (tokens, layers, size) if token_major else (layers, tokens, size)
    tensor = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
    return RegisteredHostPool.from_tensors(
        geometry, {"latent": tensor}, layer_dim=1 if token_major else 0
    )


def in_runs(rng: np.random.Generator, count: int, run: int) -> NDArray[np.int64]:
    """All of ``0 … count - 1`` in runs of `run` neighbours, the runs in random order.

    Where `run` does not divide `count` the last run is shorter; it comes anywhere too.
    """
    starts = rng.permutation(-(-count // run)) * run
    numbers = (starts[:, None] + np.arange(run)).ravel()
    return np.asarray(numbers[numbers < count], dtype=np.int64)


def device_slots(rng: np.random.Generator, num_pages: int, run: int) -> NDArray[np.int64]:
    """Token slots of `num_pages` pages, in runs of `run` that lie anywhere: ``[N, P]``."""
    return in_runs(rng, num_pages * PAGE_SIZE, run).reshape(num_pages, PAGE_SIZE)


def plans(
    geometry: Geometry, host_slots: NDArray[np.int64], slots: NDArray[np.int64]
) -> tuple[TransferPlan, TransferPlan]:
    """A store and the load that brings the same pages back."""
    from kvferry import TransferPlan

    given: dict[str, Any] = {
        "host_slots": host_slots,
        "device_slots": slots,
        "page_keys": [b"%d" % page for page in host_slots],
    }
    return TransferPlan.store(geometry, **given), TransferPlan.load(geometry, **given)


def engine(pools: Pools, tensor: torch.Tensor, **options: Any) -> TransferEngine:
    """An engine between `tensor`, one of the two of `pools`, and their host pool."""
    from kvferry import PoolView, TransferEngine

    view = PoolView.from_tensors(pools.geometry, {"latent": tensor})
    return TransferEngine(view, pools.host, **options)


def carry(engine: TransferEngine, plan: TransferPlan) -> TransferHandle:
    """Submit `plan`, and let the caller's current stream wait until all its bytes are there."""
    from kvferry import Direction

    handle = engine.load(plan) if plan.direction is Direction.LOAD else engine.store(plan)
    handle.wait_all()
    return handle


def check_round_trip(
    pools: Pools,
    writer: TransferEngine,
    reader: TransferEngine,
    plans: tuple[TransferPlan, TransferPlan],
) -> tuple[TransferHandle, TransferHandle]:
    """Store all of `source` and load it into `target`, which is poisoned before; compare bytes.

    No figure is worth printing where they differ.
    """
    import torch

    pools.target.fill_(POISON)
    stored = carry(writer, plans[0])
    stored.wait()
    loaded = carry(reader, plans[1])
    loaded.wait()
    torch.cuda.synchronize()
    assert torch.equal(pools.source, pools.target), "bytes differ after a round trip"
    assert not loaded.verified or loaded.verified_pages == pools.num_pages, loaded.bad_pages
    return stored, loaded


# -------------------------------------------------------------------------------------- the clock


def timed_event() -> Any:
    """An event that knows when it was reached."""
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def sleep(seconds: float) -> None:
    """Keep the caller's current stream busy for `seconds` or a little longer."""
    import torch

    torch.cuda._sleep(int(seconds * _CLOCKS_PER_SEC))  # type: ignore[no-untyped-call]


def gpu_timing(submit: Callable[[], TransferHandle | None], repeats: int) -> Timing:
    """What `submit` takes of the GPU, in the caller's current stream.

    `submit` enqueues the work, lets the current stream wait for it, and returns a handle where
    there is one. The stream is kept asleep for twice as long as submitting took in a warm-up, so
    that the CPU's time is not in the figure; where it is nevertheless, the sleep is made longer and
    the repeat is done again.
    """
    import torch

    asleep = _SHORTEST_SLEEP_SECS
    for warm_up in range(2):  # the first makes kernels and tables; the second tells the CPU's time
        began = time.perf_counter()
        handle = submit()
        if warm_up:
            asleep = _sleep_secs(2 * (time.perf_counter() - began))
        if handle is not None:
            handle.wait()
        torch.cuda.synchronize()
    seconds, num_exposed = [], 0
    for _ in range(repeats):
        took, exposed = _timed(submit, asleep)
        for _ in range(_RETRIES):
            if not exposed:
                break
            asleep = _sleep_secs(2 * asleep)
            took, exposed = _timed(submit, asleep)
        num_exposed += exposed
        seconds.append(took)
    return Timing(statistics.median(seconds), num_exposed)


def _timed(submit: Callable[[], TransferHandle | None], asleep: float) -> tuple[float, bool]:
    """Seconds between two events around `submit`, and whether the CPU was late with it."""
    started, ended = timed_event(), timed_event()
    sleep(asleep)
    started.record()
    handle = submit()
    exposed = bool(started.query())
    ended.record()
    if handle is not None:
        handle.wait()
    ended.synchronize()
    return started.elapsed_time(ended) / 1e3, exposed


def _sleep_secs(wanted: float) -> float:
    return min(max(wanted, _SHORTEST_SLEEP_SECS), _LONGEST_SLEEP_SECS)


def gb_per_sec(num_bytes: int, seconds: float) -> float:
    """GB/s, 10^9 bytes a second."""
    return round(num_bytes / seconds / 1e9, 2)

"""Processes joined by gloo that load in shares together; run as a script by the tests.

Arguments: a folder for what each rank reports, then worlds as ``SIZE:DEATH``, where DEATH says
where the last rank is killed at the end: ``meet`` before it agrees on a load, ``gather`` between
two exchanges, ``waiting`` in one, ``end`` before it agrees on what came of it; or ``none``. With
``:only`` behind it there is nothing before that.
torch is imported once and the ranks are forked, as its import takes longer than all scenarios.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from kvferry.errors import KVFerryError
from kvferry.exchange import ShardedLoad, ShardedLoader, WholeLoad, cut_shares
from kvferry.geometry import Geometry, Plane, PoolView
from kvferry.memory import HostPool, SlotOwner
from kvferry.ranks import (
    ExchangeBuffer,
    ExchangeRates,
    Gathering,
    GlooExchange,
    ProcessGroupRanks,
)
from kvferry.transfer import TransferEngine, TransferPlan

LONG = 20.0
POISON = 0xA5
PAGE = 4
LAYERS = 6
ODD_SIZES = (132, 576, 656, 3)
NUM_PAGES = 11
_RATES = ExchangeRates(link=1.0, gather=1.0, gather_seconds=1e-6)


def latent(element_size: int, layers: int = LAYERS) -> Geometry:
    """One plane."""
    plane = Plane(name="latent", num_layers=layers, element_size=element_size)
    return Geometry(planes=(plane,), page_size=PAGE)


def two_planes() -> Geometry:
    """One of them in some layers only, and with rows of its own."""
    return Geometry(
        planes=(
            Plane(name="latent", num_layers=5, element_size=656),
            Plane(name="index", num_layers=2, element_size=132, layer_ids=(1, 4), rows_per_page=3),
        ),
        page_size=PAGE,
    )


def _nothing(*_: object) -> None:
    """What a hook does unless a scenario has something to do there."""


class Hooked:
    """An exchange that calls the test before a gather, and once its bytes are there."""

    def __init__(self, inner: GlooExchange) -> None:
        self.inner = inner
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self.count = 0
        self.before: Callable[[int], object] = _nothing
        self.behind: Callable[[int, ExchangeBuffer], object] = _nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def gather(
        self, buffer: ExchangeBuffer, chunk_bytes: int, *, lane: int, timeout: float
    ) -> Gathering:
        number, self.count = self.count, self.count + 1
        self.before(number)
        gathering = self.inner.gather(buffer, chunk_bytes, lane=lane, timeout=timeout)
        hooked = self

        class Behind:
            def wait(self, timeout: float) -> None:
                gathering.wait(timeout)
                hooked.behind(number, buffer)

        return Behind()


class HookedRanks:
    """Ranks that call the test before an agreement."""

    def __init__(self, inner: ProcessGroupRanks) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.count = 0
        self.before: Callable[[int], object] = _nothing

    def agree_min(self, values: Sequence[int], *, timeout: float) -> list[int]:
        self.before(self.count)
        self.count += 1
        return self.inner.agree_min(values, timeout=timeout)

    def close(self) -> None:
        self.inner.close()


def gloo_group() -> Any:
    """One for a single use."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    return group


class Bench:
    """A rank's pools and loader. What is stored is the same on all ranks; where it lies is not."""

    def __init__(
        self,
        geometry: Geometry,
        rank: int,
        *,
        seed: int = 1,
        num_pages: int = NUM_PAGES,
        exchange_bytes: int = 1 << 20,
        **options: Any,
    ) -> None:
        self.geometry, self.num_pages = geometry, num_pages
        shared, own = np.random.default_rng(seed), np.random.default_rng([seed, rank])
        self.keys = [shared.bytes(8) for _ in range(num_pages)]
        self.rows, self.stored, self.pools = {}, {}, {}
        for plane in geometry.planes:
            per_page = geometry.rows_per_page(plane)
            num_rows = num_pages * per_page
            shape = (plane.num_layers, num_rows, plane.element_size)
            self.stored[plane.name] = shared.integers(0, 256, shape, dtype=np.uint8)
            self.pools[plane.name] = np.full(
                (plane.num_layers, 2 * num_rows, plane.element_size), POISON, np.uint8
            )
            self.rows[plane.name] = own.permutation(2 * num_rows)[:num_rows].reshape(-1, per_page)
        self.host_slots = own.permutation(num_pages + 2)[:num_pages]
        self.host = HostPool(geometry, num_slots=num_pages + 2)
        self.host.allocate(num_pages + 2, SlotOwner.INDEX)
        self._store()
        self.view = PoolView.from_tensors(geometry, self.pools)
        self.engine = TransferEngine(self.view, self.host)
        self.exchange = Hooked(GlooExchange(gloo_group()))
        self.ranks = HookedRanks(ProcessGroupRanks(gloo_group()))
        dist.barrier()  # ranks leave new_group one by one, and one may die from here on
        self.loader = ShardedLoader(
            self.engine,
            self.view,
            self.host,
            self.ranks,
            self.exchange,
            exchange_bytes=exchange_bytes,
            timeout=LONG,
            **{"way": "sharded", "rates": _RATES, **options},
        )
        self.exchange.count = self.ranks.count = 0

    def _store(self) -> None:
        engine = TransferEngine(PoolView.from_tensors(self.geometry, self.stored), self.host)
        rows = {
            plane.name: np.arange(self.stored[plane.name].shape[1])
            for plane in self.geometry.planes
        }
        plan = TransferPlan.store(
            self.geometry, host_slots=self.host_slots, plane_slots=rows, page_keys=self.keys
        )
        engine.store(plan).wait()

    def plan(self, pages: Sequence[int] | None = None, **given: Any) -> TransferPlan:
        at = np.arange(self.num_pages) if pages is None else np.array(pages)
        planes = given.get("planes", list(self.rows))
        return TransferPlan.load(
            self.geometry,
            **{
                "host_slots": self.host_slots[at],
                "plane_slots": {name: self.rows[name][at] for name in planes},
                "page_keys": [self.keys[page] for page in at],
                **given,
            },
        )

    def load(self, plan: TransferPlan, timeout: float = LONG) -> ShardedLoad | WholeLoad:
        return self.loader.load(plan, timeout=timeout)

    def poison(self) -> None:
        for pool in self.pools.values():
            pool[:] = POISON

    def expected(
        self, pages: Sequence[int], layers: Sequence[int] | None = None, planes: Any = None
    ) -> dict[str, NDArray[np.uint8]]:
        """The pools with these pages in place, and poison elsewhere."""
        found = {}
        for plane in self.geometry.planes:
            pool = found[plane.name] = np.full_like(self.pools[plane.name], POISON)
            per_page = self.geometry.rows_per_page(plane)
            if planes is not None and plane.name not in planes:
                continue
            for layer, model_layer in enumerate(plane.model_layers):
                if layers is None or model_layer in layers:
                    for page in pages:
                        pool[layer, self.rows[plane.name][page]] = self.stored[plane.name][
                            layer, page * per_page : (page + 1) * per_page
                        ]
        return found

    def holds(self, pages: Sequence[int], **what: Any) -> bool:
        """Whether the pools are exactly that, every byte of them."""
        expected = self.expected(pages, **what)
        return all(np.array_equal(pool, expected[name]) for name, pool in self.pools.items())

    def holds_nothing_else(self) -> bool:
        """Whether every row is what it is to become, or poison; and none outside of the plan is."""
        expected = self.expected(range(self.num_pages))
        return all(
            bool(np.all((pool == expected[name]).all(-1) | (pool == POISON).all(-1)))
            for name, pool in self.pools.items()
        )

    def whole_load(self) -> list[Any]:
        """What a load does once ranks exchange no more."""
        self.poison()
        handle = self.load(self.plan())
        handle.wait()
        return [handle.path, handle.way.reason, self.holds(range(self.num_pages)), handle.agreed]


def told(handle: ShardedLoad | WholeLoad) -> dict[str, Any]:
    """How a load ended."""
    raised = ""
    try:
        handle.wait(2 * LONG)
    except KVFerryError as bad:
        raised = type(bad).__name__
    cause = None if handle.error is None else handle.error.__cause__
    return {
        "path": handle.path,
        "raised": raised,
        "error": str(handle.error or ""),
        "cause": type(cause).__name__,
        "bad": list(handle.bad_pages),
        "verified": handle.verified_pages,
    }


class Rank:
    """One process of a world, going through its scenarios."""

    def __init__(self, rank: int, size: int, tell: Callable[[], None], go: Callable[[], None]):
        self.rank, self.size = rank, size
        self.last = rank == size - 1
        self._tell, self._go = tell, go
        self.report: dict[str, Any] = {}

    def exact(self) -> None:
        """Every size, more and fewer pages than ranks, rooms that hold all of them or few."""
        found = []
        for geometry in (*map(latent, ODD_SIZES), two_planes()):
            # A page of two layers for each rank in each of the two rooms, and a room for all.
            layer = sum(-(-PAGE * plane.element_size // 16) * 16 for plane in geometry.planes)
            for exchange_bytes in (2 * self.size * 2 * layer, 1 << 20):
                bench = Bench(geometry, self.rank, exchange_bytes=exchange_bytes)
                gathers = []
                for pages in ([3], [5, 1], list(range(self.size + 1)), list(range(NUM_PAGES))):
                    bench.poison()
                    bench.exchange.count = 0
                    handle = bench.load(bench.plan(pages))
                    handle.wait(LONG)
                    gathers.append(bench.exchange.count)
                    found.append(handle.verified_pages == len(pages) and bench.holds(pages))
                    self.report.setdefault("paths", {})[handle.path] = handle.way.reason
                self.report.setdefault("gathers", []).append(gathers)
                bench.loader.close()
        self.report["exact"] = found

    def parts(self) -> None:
        """Some layers, or one plane of two; and loads of which each is submitted at once."""
        bench = Bench(two_planes(), self.rank)
        some: list[dict[str, Any]] = [
            {"layers": [0, 4]},
            {"planes": ["index"]},
            {"layers": [1], "planes": ["index"]},
        ]
        for what in some:
            bench.poison()
            bench.load(bench.plan(**what)).wait(LONG)
            self.report.setdefault("parts", []).append(bench.holds(range(NUM_PAGES), **what))
        bench.poison()
        loads = [bench.load(bench.plan(pages)) for pages in ([0, 9], [4], [7, 2, 1])]
        for load in loads:
            load.wait(LONG)
        self.report["several"] = bench.holds([0, 9, 4, 7, 2, 1])
        bench.loader.close()

    def layers(self) -> None:
        """Layer 0 is there while a later exchange is held up."""
        bench = Bench(latent(656), self.rank)
        go = threading.Event()
        bench.exchange.before = lambda number: number != 2 or go.wait(LONG)
        handle = bench.load(bench.plan())
        handle.wait_layer(0)
        first = bench.expected(range(NUM_PAGES), layers=[0])["latent"][0]
        early = [handle.done, bool(np.array_equal(bench.pools["latent"][0], first))]
        go.set()
        handle.wait_all()
        handle.wait(LONG)
        self.report["layers"] = [*early, bench.holds(range(NUM_PAGES))]
        bench.loader.close()

    def damage(self) -> None:
        """A bit of one rank's host page; of one rank's room behind an exchange; a digest less."""
        bench = Bench(latent(656), self.rank)
        share = cut_shares(NUM_PAGES, self.size)[-1]
        page = share[0]
        view = bench.host.view.view("latent", 3)
        slot = int(bench.host_slots[page])
        if self.last:
            from kvferry.testing import memory_at

            memory_at(view.row_address(slot * PAGE), 1)[0] ^= 1
        outcome = told(bench.load(bench.plan()))
        expected = bench.expected(range(NUM_PAGES))["latent"]
        expected[3, bench.rows["latent"][page]] = POISON
        untouched = np.array_equal(bench.pools["latent"], expected)
        self.report["host_bit"] = [page, outcome, bool(untouched)]
        bench.loader.close()

        bench = Bench(latent(656), self.rank)

        def flip(number: int, buffer: ExchangeBuffer) -> None:
            if number == 1:
                buffer.tensor[0] ^= 1  # of page 0, in layer 1

        if self.last:
            bench.exchange.behind = flip
        self.report["exchange_bit"] = told(bench.load(bench.plan()))
        bench.exchange.behind = _nothing
        bench.poison()
        self.report["after_bits"] = [told(bench.load(bench.plan())), bench.holds(range(NUM_PAGES))]
        if self.rank == 0:
            bench.host.digests[bench.host_slots[2], 1] = 0
        self.report["no_digest"] = told(bench.load(bench.plan()))
        bench.loader.close()

    def faults(self) -> None:
        """One rank cannot copy, is given a bad plan, or loads another one; then all is well."""
        bench = Bench(latent(132), self.rank)
        if self.last:

            def full(*_: Any, **__: Any) -> Any:
                raise MemoryError("no memory for this")

            carrier: Any = bench.loader._exchanger.rooms[1].intake._carrier
            moves, carrier._move_span = carrier._move_span, full
            self.report["copy"] = told(bench.load(bench.plan()))
            carrier._move_span = moves
        else:
            self.report["copy"] = told(bench.load(bench.plan()))
        try:
            outside = {"latent": bench.rows["latent"] + (1 << 20 if self.last else 0)}
            handle = bench.load(bench.plan(plane_slots=outside))
        except KVFerryError as bad:
            self.report["refused"] = {"raised": type(bad).__name__, "error": str(bad)}
        else:
            self.report["refused"] = told(handle)
        bench.poison()
        self.report["other"] = told(bench.load(bench.plan([1, 2] if self.last else [2, 1])))
        self.report["nothing_moved"] = bench.holds([])
        self.report["then"] = [told(bench.load(bench.plan())), bench.holds(range(NUM_PAGES))]
        self.report["agreements"] = bench.ranks.count
        bench.loader.close()

    def unlike(self) -> None:
        """One rank makes its loader otherwise."""
        try:
            Bench(latent(132), self.rank, exchange_bytes=(2 if self.last else 1) << 20)
        except KVFerryError as bad:
            self.report["unlike"] = [type(bad).__name__, str(bad)]

    def measured(self) -> None:
        """Rates are measured, and are those of the slowest rank."""
        bench = Bench(latent(132), self.rank, rates=None, way=None)
        rates = bench.loader.rates
        self.report["rates"] = [rates.link, rates.gather, rates.gather_seconds]
        handle = bench.load(bench.plan())
        handle.wait(LONG)
        self.report["chosen"] = [handle.way.sharded, bench.holds(range(NUM_PAGES))]
        bench.loader.close()

    def beside(self) -> None:
        """Agreements of the caller's own while loads are in flight: each keeps its order."""
        bench = Bench(latent(576), self.rank)
        plain = ProcessGroupRanks(gloo_group())
        rng = np.random.default_rng(7)
        brought = rng.integers(-1000, 1000, (40, self.size))
        agreed, loads = [], []
        for number, values in enumerate(brought.tolist()):
            if number % 8 == 0:
                loads.append(bench.load(bench.plan()))
            agreed += plain.agree_min([values[self.rank]], timeout=LONG)
        for load in loads:
            load.wait(LONG)
        self.report["beside"] = [
            agreed == brought.min(axis=1).tolist(),
            [load.verified_pages for load in loads],
            bench.holds(range(NUM_PAGES)),
        ]
        bench.loader.close()

    def defect(self) -> None:
        """The thread of one rank ends on an error of our own, with another load behind it."""
        bench = Bench(latent(132), self.rank)
        threading.excepthook = lambda _: None
        go = threading.Event()

        def carry(_: ShardedLoad) -> Any:
            go.wait(LONG)
            raise ZeroDivisionError

        if self.last:
            exchanger: Any = bench.loader._exchanger
            exchanger.carry = carry
        loads = [bench.load(bench.plan(), 2.0), bench.load(bench.plan(), 2.0)]
        go.set()
        self.report["defect"] = [told(load) for load in loads]
        self.report["after_defect"] = bench.whole_load()
        bench.loader.close()
        threading.excepthook = threading.__excepthook__

    def late(self) -> None:
        """The last rank comes when the others have given up."""
        bench = Bench(latent(132), self.rank)
        if self.last:
            dist.barrier()
        self.report["late"] = told(bench.load(bench.plan(), LONG if self.last else 0.5))
        if not self.last:
            dist.barrier()
        self.report["after_late"] = bench.whole_load()
        bench.loader.close()

    def death(self, where: str) -> None:
        """The last rank is killed, by itself or from outside."""
        bench = Bench(latent(656), self.rank)
        plain = ProcessGroupRanks(gloo_group())
        dist.barrier()

        def die(_: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if self.last and where == "meet":
            bench.ranks.before = die
        if self.last and where == "end":
            bench.ranks.before = lambda number: die(0) if number == 1 else None
        if self.last and where == "gather":
            bench.exchange.before = lambda number: die(0) if number == 2 else None
        if where == "waiting":
            # The last rank is in exchange 2, which rank 0 does not come to before it is no more.
            if self.last:
                bench.exchange.behind = lambda number, _: self._tell() if number == 1 else None
            if self.rank == 0:
                bench.exchange.before = lambda number: self._go() if number == 2 else None
        self.report["death"] = told(bench.load(bench.plan()))
        self.report["rows"] = bench.holds_nothing_else()
        try:
            plain.agree_min([self.rank], timeout=LONG)
        except KVFerryError as bad:
            self.report["agreement"] = type(bad).__name__
        self.report["pid"] = os.getpid()
        self.report["after_death"] = bench.whole_load()
        bench.loader.close()


def _run_rank(folder: Path, rank: int, size: int, death: str, pipes: tuple[int, int]) -> None:
    told_pipe, go = pipes
    signal.alarm(100)  # a rank that waits for one that failed does not outlive the test
    one = Rank(rank, size, lambda: _write(told_pipe), lambda: _read(go))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    death, _, only = death.partition(":")
    if not only:
        one.exact()
    if size > 1 and not only:
        one.parts()
        one.layers()
        one.damage()
        one.faults()
        one.unlike()
        one.measured()
        one.beside()
        one.defect()
        one.late()
    if death != "none":
        one.death(death)
    (folder / f"{rank}.json").write_text(json.dumps(one.report))


def _write(pipe: int) -> None:
    os.write(pipe, b"x")


def _read(pipe: int) -> None:
    assert os.read(pipe, 1) == b"x"


def _run_world(folder: Path, size: int, death: str) -> None:
    folder.mkdir()
    told_pipe, tell = os.pipe()
    wait, go = os.pipe()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _run_rank(folder, rank, size, death, (tell, wait))
                status = 0
            finally:
                # Not through the parent's exit, and not through gloo's: groups are broken here.
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    os.close(tell)
    ended = {}
    if death.startswith("waiting") and os.read(told_pipe, 1):
        os.kill(children[-1], signal.SIGKILL)
    if death != "none":
        ended[children[-1]] = os.waitpid(children[-1], 0)[1]
        _write(go)
    for child in children:
        if child not in ended:
            ended[child] = os.waitpid(child, 0)[1]
    (folder / "ended.json").write_text(json.dumps([ended[child] for child in children]))
    (folder / "pids.json").write_text(json.dumps(children))
    for pipe in (told_pipe, wait, go):
        os.close(pipe)


if __name__ == "__main__":
    signal.alarm(110)
    for world in sys.argv[2:]:
        count, _, how = world.partition(":")
        _run_world(Path(sys.argv[1], world), int(count), how)

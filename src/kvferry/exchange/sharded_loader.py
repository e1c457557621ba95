"""Loads into device pools that hold the same bytes on every rank, each page over one link only."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from kvferry.closing import ClosedAtExit
from kvferry.errors import (
    CacheError,
    ConfigError,
    KVFerryError,
    PlanError,
    RankError,
    RankMismatchError,
    TransferError,
    TransferTimeoutError,
    ViewError,
)
from kvferry.exchange.exchanger import Exchanger, Outcome
from kvferry.exchange.sharded_load import ShardedLoad, WholeLoad
from kvferry.exchange.way import Way, choose_way
from kvferry.ranks import ExchangeRates, ProcessWatch
from kvferry.transfer import DeviceRows
from kvferry.types import Direction

if TYPE_CHECKING:
    from kvferry.geometry import PoolView
    from kvferry.ranks import ByteExchange, Ranks
    from kvferry.transfer import HostPages, TransferEngine, TransferPlan

__all__ = ["DEFAULT_EXCHANGE_BYTES", "ShardedLoader"]

DEFAULT_EXCHANGE_BYTES = 128 << 20
_DEFAULT_STAGING_BYTES = 16 << 20

_NOT_MINE = (1 << 63) - 1
_REFUSED, _READY = 0, 1
_BROKEN, _FAULT, _DONE = 0, 1, 2
# Rates go through agreements as bytes a second, times as nanoseconds.
_NANO = 1e9
# For the system to see that a process is gone whose connections are closed.
_SEE_SECS = 1.0


class ShardedLoader(ClosedAtExit):
    """Loads of one rank of several whose pools are to hold the same bytes, as latents of MLA do.

    Each rank makes one, at the same time, and makes the same loads in the same order, of the same
    pages; device slots are each rank's own, and so may host slots be. Where it is faster, each rank
    loads a share of the pages and the ranks exchange them; else each loads all of them. Stores, and
    whatever else is a rank's own, go by the engine as always. One thread uses a loader; exchanges
    go on in a thread of its own, which alone uses `ranks` and `exchange` from then on.

    Where ranks could not exchange, by a rank that died or was late, all later loads are whole.

    Args:
        engine: Carries out what is loaded whole; the caller's own, and not closed here.
        device: Its device pool.
        host: Its page slots.
        ranks: Of all ranks, for nothing else.
        exchange: Of the same ranks, over another group.
        exchange_bytes: Device memory that pages pass through, allocated once; the same on all.
        staging_bytes: On a GPU, device memory for what is staged on its way into a room, as for
            `TransferEngine`; in host memory there is none.
        rates: What link and exchange carry; None: measured here. The slowest of all ranks counts.
        way: ``sharded`` or ``whole``, whatever is faster; the same on all. None: the faster.
        timeout: Seconds until all ranks must have made it.

    Raises:
        ConfigError: An argument cannot be, or `ranks` and `exchange` are of different sizes.
        ViewError: `exchange` is for another device than the pool's.
        RankMismatchError: Ranks differ in geometry or arguments.
        RankError: A rank did not come, or is dead.
    """

    def __init__(
        self,
        engine: TransferEngine,
        device: PoolView,
        host: HostPages,
        ranks: Ranks,
        exchange: ByteExchange,
        *,
        exchange_bytes: int = DEFAULT_EXCHANGE_BYTES,
        staging_bytes: int = _DEFAULT_STAGING_BYTES,
        rates: ExchangeRates | None = None,
        way: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if (ranks.rank, ranks.size) != (exchange.rank, exchange.size):
            raise ConfigError(
                f"rank {ranks.rank} of {ranks.size} would exchange as rank {exchange.rank} of "
                f"{exchange.size}: make both groups of the same processes, in the same order"
            )
        if exchange.device != device.device:
            raise ViewError(
                f"the exchange is between {exchange.device} memories, and the pool is on "
                f"{device.device}: use GlooExchange in host memory, NcclExchange on GPUs"
            )
        if way not in (None, "sharded", "whole"):
            raise ConfigError(f"way={way!r} is none of sharded and whole; or give None")
        deadline = time.monotonic() + timeout
        self._engine, self._host, self._device = engine, host, device
        self._ranks, self._exchange, self._wanted = ranks, exchange, way
        self._broken = ""
        self._closed = False
        # So that no load is queued behind the end of the thread.
        self._entry = threading.Lock()
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[ShardedLoad | None] = queue.SimpleQueue()
        with contextlib.ExitStack() as undo:
            self._exchanger = Exchanger(
                device,
                host,
                exchange,
                exchange_bytes=exchange_bytes,
                staging_bytes=staging_bytes,
                verify=engine.verify,
            )
            undo.callback(self._exchanger.close)
            self._check_alike(exchange_bytes, way, rates is None, _left(deadline))
            self._watch = ProcessWatch(ranks, timeout=_left(deadline))
            undo.callback(self._watch.close)
            if rates is None:
                rates = exchange.measure(self._exchanger.rooms[0].buffer, timeout=_left(deadline))
            self.rates, self.agree_seconds = self._agreed_rates(rates, _left(deadline))
            """What ways are chosen by: the slowest of all ranks."""

            undo.pop_all()

    @property
    def broken(self) -> str:
        """Why ranks exchange no more, and every load is whole; empty while they do."""
        return self._broken

    def way(self, plan: TransferPlan) -> Way:
        """How `plan` would be loaded now, and why."""
        if self._broken:
            return Way(False, f"ranks exchange no more: {self._broken}")
        return choose_way(
            num_bytes=plan.num_bytes,
            num_pages=plan.num_pages,
            size=self._ranks.size,
            num_steps=max(1, self._exchanger.num_steps(plan)),
            rates=self.rates,
            agree_seconds=self.agree_seconds,
            wanted=self._wanted,
        )

    def load(
        self, plan: TransferPlan, stream: int | None = None, *, timeout: float = 30.0
    ) -> ShardedLoad | WholeLoad:
        """Bring the plan's pages to this rank's device, as the other ranks do to theirs.

        Args:
            plan: What moves, of the same pages on every rank.
            stream: As for `TransferEngine.load`.
            timeout: Seconds until the ranks must have exchanged it. It begins now, whatever was
                loaded before and goes on.

        Raises:
            As `TransferEngine.load`, and PlanError where device slots lie on the device. The other
            ranks are told, and their load fails.
            CacheError: The loader is closed.
            TransferError: On a GPU: ranks failed, and what they had exchanged is not over yet.
        """
        if self._closed:
            raise CacheError("the sharded loader is closed; make a new one on all ranks")
        if not 0 < timeout <= 86_400:
            raise ConfigError(f"timeout={timeout!r}: give seconds, more than 0 and at most a day")
        way = self.way(plan)
        if not way.sharded:
            if self._broken and not self._exchanger.quiet:
                raise TransferError(
                    "what a load in shares brought before ranks failed is still put in place, and "
                    "would come over this load: wait until that ends, or make a new engine"
                )
            return WholeLoad(self._engine.load(plan, stream), way)
        load = ShardedLoad(
            plan,
            way,
            verified=self._engine.verify,
            timeout=timeout,
            size=self._ranks.size,
            mark=self._exchange.mark(stream),
        )
        try:
            self._check(plan, stream)
        except KVFerryError as bad:
            load.refused = True
            load.fail(f"this rank refused it: {bad}")
            self._submit(load)
            raise
        self._submit(load)
        return load

    def close(self, timeout: float = 60.0) -> None:
        """End what is under way, by its deadline, and give the exchange's memory back.

        Raises TransferTimeoutError where it did not end; then nothing is given back.
        """
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(timeout)
            if thread.is_alive():
                self._thread = thread
                raise TransferTimeoutError(
                    f"a sharded load is not over after {timeout:g} s: close again after its "
                    f"deadline"
                )
        self._exchanger.close()
        self._watch.close()

    def _check(self, plan: TransferPlan, stream: int | None) -> None:
        if stream is not None and self._device.device == "cpu":
            raise PlanError(
                f"stream {stream}: pools in host memory have no streams; submit without one"
            )
        for name, rows in plan.device_rows.items():
            if isinstance(rows, DeviceRows):
                raise PlanError(
                    f"device slots of plane {name!r} are on {rows.device}, and a sharded load puts "
                    f"them in order on the host: give a list or an array"
                )
        self._engine.check(plan, Direction.LOAD)

    def _submit(self, load: ShardedLoad) -> None:
        with self._entry:
            if self._broken:
                load.fail(f"ranks exchange no more: {self._broken}")
                return
            self._jobs.put(load)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvferry-exchange", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (load := self._jobs.get()) is not None:
            try:
                self._carry(load)
            finally:
                # Nothing that was raised leaves a handle open, or other ranks in wait.
                if not load.done:
                    self._break(load, RankError("the exchange thread met an unexpected error"))
                    while not self._jobs.empty():
                        if (queued := self._jobs.get()) is not None:
                            queued.fail(f"ranks exchange no more: {self._broken}")

    def _carry(self, load: ShardedLoad) -> None:
        if self._broken:
            load.fail(f"ranks exchange no more: {self._broken}")
            return
        try:
            if not self._meet(load):
                return
            outcome = self._exchanger.carry(load)
            self._end(load, outcome)
        except RankError as bad:
            self._break(load, bad)

    def _meet(self, load: ShardedLoad) -> bool:
        """Whether all ranks are at the same load and can go on; the same on all of them."""
        own = _REFUSED if load.refused else _READY
        told = self._told((own, _identity(load.plan)), load.left)
        refused = [rank for rank, (state, _) in enumerate(told) if state == _REFUSED]
        if refused:
            load.fail(f"rank {refused[0]} of {len(told)} refused its plan: see the error there")
            return False
        differ = [rank for rank, (_, what) in enumerate(told) if what != told[0][1]]
        if differ:
            bad = RankMismatchError(
                f"rank {differ[0]} of {len(told)} loads other pages, planes or layers than rank 0: "
                f"make the same loads in the same order on all ranks"
            )
            load.fail(str(bad), bad)
            return False
        return True

    def _end(self, load: ShardedLoad, outcome: Outcome) -> None:
        state = _BROKEN if outcome.broken else _DONE if outcome.fault is None else _FAULT
        table = [_NOT_MINE] * self._ranks.size
        table[self._ranks.rank] = state
        try:
            told = self._ranks.agree_min([*table, *outcome.good.tolist()], timeout=load.left)
        except RankError as bad:
            raise (outcome.fault if isinstance(outcome.fault, RankError) else bad) from bad
        states, good = told[: self._ranks.size], told[self._ranks.size :]
        if _BROKEN in states:
            rank = states.index(_BROKEN)
            mine = outcome.fault if outcome.broken else None
            self._break(
                load,
                mine
                if isinstance(mine, RankError)
                else RankError(f"rank {rank} of {len(states)} could not exchange"),
            )
        elif _FAULT in states:
            rank = states.index(_FAULT)
            told_here = f": {outcome.fault}" if outcome.fault else ": see the error there"
            load.fail(f"rank {rank} of {len(states)} failed{told_here}", outcome.fault)
        else:
            load.finish(tuple(int(page) for page in np.flatnonzero(np.array(good) == 0)))

    def _break(self, load: ShardedLoad, bad: RankError) -> None:
        """No exchange from here on: this load fails, the next ones are whole."""
        self._exchange.break_off()
        gone = self._watch.named(min(_SEE_SECS, self._watch_secs(load)))
        reason = f"{gone}; {bad}" if gone else str(bad)
        with self._entry:
            self._broken = self._broken or reason
        load.fail(reason, bad)

    def _watch_secs(self, load: ShardedLoad) -> float:
        # A rank that is late is no rank that is gone: its error has waited long enough.
        return load.left if time.monotonic() < load.deadline else 0.0

    def _told(self, own: tuple[int, ...], timeout: float) -> list[tuple[int, ...]]:
        """What each rank tells: one agreement."""
        width = len(own)
        table = [_NOT_MINE] * (width * self._ranks.size)
        table[self._ranks.rank * width : (self._ranks.rank + 1) * width] = own
        told = self._ranks.agree_min(table, timeout=timeout)
        return [tuple(told[at : at + width]) for at in range(0, len(told), width)]

    def _check_alike(
        self, exchange_bytes: int, way: str | None, measures: bool, timeout: float
    ) -> None:
        fields = {
            "geometry": self._device.geometry.fingerprint,
            "slot kind": self._host.kind.value,
            "verify": self._engine.verify,
            "exchange_bytes": exchange_bytes,
            "way": way,
            "rates, given or not": measures,
        }
        own = tuple(_number(repr(value).encode()) for value in fields.values())
        told = self._told(own, timeout)
        for at, name in enumerate(fields):
            differ = [rank for rank, one in enumerate(told) if one[at] != told[0][at]]
            if differ:
                raise RankMismatchError(
                    f"rank {differ[0]} of {len(told)} has another {name} than rank 0: make sharded "
                    f"loaders alike on all ranks"
                )

    def _agreed_rates(self, rates: ExchangeRates, timeout: float) -> tuple[ExchangeRates, float]:
        deadline = time.monotonic() + timeout
        started = time.monotonic()
        told = self._ranks.agree_min(
            [
                int(rates.link * _NANO),
                int(rates.gather * _NANO),
                -int(rates.gather_seconds * _NANO),
            ],
            timeout=_left(deadline),
        )
        own = -int((time.monotonic() - started) * _NANO)
        (slowest,) = self._ranks.agree_min([own], timeout=_left(deadline))
        link, gather, seconds = told
        return (
            ExchangeRates(max(link, 1) / _NANO, max(gather, 1) / _NANO, -seconds / _NANO),
            -slowest / _NANO,
        )


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _number(of: bytes) -> int:
    """63 bits that other bytes do not have."""
    return int.from_bytes(hashlib.blake2b(of, digest_size=8).digest(), "little") >> 1


def _identity(plan: TransferPlan) -> int:
    """63 bits of what a plan loads, and nothing of where to."""
    spans = ",".join(str(span.index) for span in plan.spans)
    told = f"{plan.geometry.fingerprint} {plan.kind.value} {plan.num_pages} {spans} "
    return _number(told.encode() + plan.page_seeds.tobytes())

"""Carries out one sharded load after another: shares in, exchange, pages out, what came of it.

step 0   load the share ─▶ all-gather ─▶ compare digests, put in place ─▶ layer 0 is ready
step 1                     load the share ─▶ all-gather ─▶ …                (the other room)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.errors import (
    ConfigError,
    KVFerryError,
    RankError,
    RankTimeoutError,
    TransferTimeoutError,
)
from kvferry.exchange.exchange_room import (
    ExchangePages,
    StepLayout,
    exchange_view,
    rows_of_slots,
    step_layouts,
)
from kvferry.exchange.shares import Round, cut_shares, rounds_of
from kvferry.transfer import TransferEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvferry.exchange.sharded_load import ShardedLoad
    from kvferry.geometry import PoolView, Span
    from kvferry.ranks import ByteExchange, ExchangeBuffer, Gathering
    from kvferry.transfer import HostPages, TransferHandle, TransferPlan

__all__ = ["Exchanger", "Outcome"]

_NUM_ROOMS = 2


class Outcome(NamedTuple):
    """What this rank has to say of a load when it comes to the end of it."""

    good: NDArray[np.int64]
    """Shape: ``[N]``. 1 where the page's digests match, or are not compared."""

    fault: KVFerryError | None = None
    """Why nothing of it may be used."""

    broken: bool = False
    """The fault is of the exchange, which cannot be used again."""


class _Step(NamedTuple):
    layout: StepLayout
    spans: tuple[Span, ...]
    round: Round
    is_last: bool
    """Of the rounds of its layers."""


class _Room:
    """One of the two rooms, and the engines on both sides of it."""

    def __init__(
        self,
        lane: int,
        buffer: ExchangeBuffer,
        device: PoolView,
        host: HostPages,
        layouts: tuple[StepLayout, ...],
        *,
        verify: bool,
        staging_bytes: int,
    ) -> None:
        self.lane, self.buffer = lane, buffer
        self.num_slots = buffer.num_bytes // max(layout.pitch for layout in layouts)
        view = exchange_view(
            device.geometry, host.kind, layouts, buffer, device.device, self.num_slots
        )
        self.pages = ExchangePages(view, host.kind, self.num_slots, buffer)
        on_gpu = device.device != "cpu"
        # The digest is compared once, behind everything that can go wrong.
        self.intake = TransferEngine(
            view, host, verify=False, staging_bytes=staging_bytes if on_gpu else None
        )
        self.outlay = TransferEngine(
            device,
            self.pages,
            verify=verify,
            mover="direct" if on_gpu else None,
            staging_bytes=0 if on_gpu else None,
        )
        self.leaving: tuple[TransferHandle, NDArray[np.int64]] | None = None
        """What is still read from it, and which pages of the plan these are."""

    def close(self) -> None:
        self.intake.close()
        self.outlay.close()
        self.pages.close()


class Exchanger:
    """The rooms of one rank. One thread uses it.

    Args:
        device: The engine's pool.
        host: Page slots.
        exchange: Between the ranks.
        exchange_bytes: Of both rooms together.
        staging_bytes: On a GPU, of the engine that fills a room, as for `TransferEngine`.
        verify: Compare digests.

    Raises:
        ConfigError: `exchange_bytes` is too little for a page of one layer of each rank.
    """

    def __init__(
        self,
        device: PoolView,
        host: HostPages,
        exchange: ByteExchange,
        *,
        exchange_bytes: int,
        staging_bytes: int,
        verify: bool,
    ) -> None:
        room_bytes = exchange_bytes // _NUM_ROOMS
        if room_bytes < exchange.size:
            raise ConfigError(
                f"exchange_bytes={exchange_bytes} for {exchange.size} ranks: give some MiB"
            )
        self._host, self._exchange = host, exchange
        self.layouts = step_layouts(device.geometry, host.kind, room_bytes // exchange.size)
        self.rooms = tuple(
            _Room(
                lane,
                exchange.buffer(room_bytes),
                device,
                host,
                self.layouts,
                verify=verify,
                staging_bytes=staging_bytes,
            )
            for lane in range(_NUM_ROOMS)
        )

    @property
    def quiet(self) -> bool:
        """Whether nothing is on its way from a room to its rows."""
        return all(room.leaving is None or room.leaving[0].done for room in self.rooms)

    def num_steps(self, plan: TransferPlan) -> int:
        """How many all-gathers `plan` takes."""
        return sum(1 for _ in self._steps(plan))

    def carry(self, load: ShardedLoad) -> Outcome:
        """Bring the pages of `load` in place. Raises nothing that is kvferry's: it is in there."""
        good = np.ones(load.plan.num_pages, dtype=np.int64)
        self._fault: KVFerryError | None = None
        under_way: tuple[_Step, _Room, Gathering] | None = None
        self._exchange.follow(load.mark)
        try:
            for number, step in enumerate(self._steps(load.plan)):
                room = self.rooms[number % _NUM_ROOMS]
                self._settle(room, load, good)
                self._take_in(step, room, load)
                gathering = self._exchange.gather(
                    room.buffer,
                    step.round.chunk_slots * step.layout.pitch,
                    lane=room.lane,
                    timeout=load.left,
                )
                if under_way is not None:
                    self._lay_out(*under_way, load)
                under_way = step, room, gathering
            if under_way is not None:
                self._lay_out(*under_way, load)
            for room in self.rooms:
                self._settle(room, load, good)
        except RankError as bad:
            self._exchange.break_off()
            self._drain(load)
            return Outcome(good, bad, broken=True)
        return Outcome(good, self._fault)

    def close(self) -> None:
        """Give back what the rooms hold."""
        for room in self.rooms:
            room.close()

    def _steps(self, plan: TransferPlan) -> Iterator[_Step]:
        size = self._exchange.size
        most_slots = self.rooms[0].num_slots // size
        rounds = rounds_of(cut_shares(plan.num_pages, size), most_slots)
        for layout in self.layouts:
            spans = tuple(span for span in plan.spans if span.index in layout.offsets)
            if spans:
                for one in rounds:
                    yield _Step(layout, spans, one, one is rounds[-1])

    def _take_in(self, step: _Step, room: _Room, load: ShardedLoad) -> None:
        """This rank's own share, over its own link."""
        own = step.round.pages[self._exchange.rank]
        if not own:
            return
        slots = step.round.slots_of(self._exchange.rank)
        plan = load.plan.part(
            np.arange(own.start, own.stop),
            step.spans,
            device_rows=rows_of_slots(step.spans, slots),
        )
        stream = self._exchange.stream(room.lane)
        try:
            handle = room.intake.load(plan, stream)
            if handle.done and handle.error is not None:
                raise handle.error
            handle.wait_all(stream)
        except KVFerryError as bad:
            # It goes on: the others wait for this rank's chunk, whatever is in it.
            self._fault = self._fault or bad

    def _lay_out(self, step: _Step, room: _Room, gathering: Gathering, load: ShardedLoad) -> None:
        """Every page of the step, from the room to its rows."""
        gathering.wait(load.left)
        pages, slots = step.round.all_pages, step.round.all_slots
        columns = np.array([span.index for span in step.spans])
        room.pages.digests[np.ix_(slots, columns)] = self._host.digests[
            np.ix_(load.plan.host_slots[pages], columns)
        ]
        plan = load.plan.part(pages, step.spans, host_slots=slots)
        try:
            handle = room.outlay.load(plan, self._exchange.stream(room.lane))
        except KVFerryError as bad:
            self._fault = self._fault or bad
            return
        room.leaving = handle, pages
        load.arrive(handle, complete=step.is_last)

    def _settle(self, room: _Room, load: ShardedLoad, good: NDArray[np.int64]) -> None:
        """Wait until nothing is read from `room`, and take note of what was bad."""
        leaving, room.leaving = room.leaving, None
        if leaving is None:
            return
        handle, pages = leaving
        try:
            handle.wait(load.left)
        except TransferTimeoutError as late:
            room.leaving = leaving
            raise RankTimeoutError(f"the bytes of some rank have not come: {late}") from late
        except KVFerryError as bad:
            self._fault = self._fault or bad
        good[pages[list(handle.bad_pages)]] = 0

    def _drain(self, load: ShardedLoad) -> None:
        """After a failure: what is in streams ends, as the exchange was broken off."""
        for room in self.rooms:
            if room.leaving is not None:
                try:
                    room.leaving[0].wait(load.timeout)
                except KVFerryError as bad:
                    self._fault = self._fault or bad

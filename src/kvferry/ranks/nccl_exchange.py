"""Ranks that exchange bytes between GPUs, over NCCL."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from kvferry.ranks.byte_exchange import (
    ExchangeBuffer,
    ExchangeRates,
    Gathering,
    exchange_failed,
    fastest,
    member_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from kvferry.errors import RankError

__all__ = ["NcclExchange"]

_NUM_LANES = 2
_LINK_BYTES = 64 << 20


class NcclExchange:
    """`ByteExchange` between GPUs, in two streams of its own, over a group that nothing else uses.

    Make that with ``torch.distributed.new_group(backend="nccl")`` on all ranks. Nothing but
    `measure` waits for the GPU: whether bytes came is seen by what reads them behind the exchange.

    Args:
        group: The group.
        device: This rank's GPU, such as ``cuda:0``.

    Raises:
        ConfigError: This process is no member of the group, or the group is no NCCL group.
        MissingDependencyError: torch is not installed.
    """

    def __init__(self, group: ProcessGroup, device: str) -> None:
        self.rank, self.size = member_of(group, "cuda:nccl", "nccl")
        import torch

        self.device = device
        self._group = group
        self._torch = torch
        self._lanes: list[Any] = [torch.cuda.Stream(device) for _ in range(_NUM_LANES)]  # type: ignore[no-untyped-call]

    def buffer(self, num_bytes: int) -> ExchangeBuffer:
        """See `ByteExchange.buffer`."""
        tensor = self._torch.zeros(num_bytes, dtype=self._torch.uint8, device=self.device)
        self._torch.cuda.synchronize(self.device)  # both lanes begin behind the zeros
        return ExchangeBuffer(tensor, tensor.data_ptr(), num_bytes)

    def stream(self, lane: int) -> int:
        """See `ByteExchange.stream`."""
        return int(self._lanes[lane].cuda_stream)

    def mark(self, stream: int | None) -> Any:
        """See `ByteExchange.mark`."""
        cuda: Any = self._torch.cuda
        if stream is None:
            theirs = cuda.current_stream(self.device)
        elif stream:
            theirs = cuda.ExternalStream(stream, device=self.device)
        else:  # torch takes 0 for no handle at all
            theirs = cuda.default_stream(self.device)
        event = cuda.Event()
        event.record(theirs)
        return event

    def follow(self, mark: Any) -> None:
        """See `ByteExchange.follow`."""
        for lane in self._lanes:
            lane.wait_event(mark)

    def gather(
        self, buffer: ExchangeBuffer, chunk_bytes: int, *, lane: int, timeout: float
    ) -> Gathering:
        """See `ByteExchange.gather`."""
        del timeout  # NCCL knows none of a single call: who waits for the bytes has one
        everything = buffer.tensor[: self.size * chunk_bytes]
        own = everything[self.rank * chunk_bytes : (self.rank + 1) * chunk_bytes]
        with self._torch.cuda.stream(self._lanes[lane]):
            try:
                work = self._torch.distributed.all_gather_into_tensor(
                    everything, own, group=self._group, async_op=True
                )
            except RuntimeError as bad:
                self.break_off()
                raise exchange_failed(self.rank, self.size, bad, is_late=False) from bad
        return _NcclGathering(self, work, self._lanes[lane])

    def measure(self, buffer: ExchangeBuffer, *, timeout: float) -> ExchangeRates:
        """See `ByteExchange.measure`. The link is a copy from pinned memory."""
        torch, deadline = self._torch, time.monotonic() + timeout
        num_bytes = min(_LINK_BYTES, buffer.num_bytes)
        source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)

        def copied() -> None:
            buffer.tensor[:num_bytes].copy_(source, non_blocking=True)
            torch.cuda.synchronize(self.device)

        def gathered(chunk_bytes: int) -> None:
            left = max(deadline - time.monotonic(), 0.001)
            self.gather(buffer, chunk_bytes, lane=0, timeout=left).wait(left)
            self._reach(self._lanes[0], deadline)

        chunk = buffer.num_bytes // self.size
        link, full, least = (
            fastest(copied),
            fastest(lambda: gathered(chunk)),
            fastest(lambda: gathered(1)),
        )
        received = max(chunk * (self.size - 1), 1)
        return ExchangeRates(
            num_bytes / link / 1e9, received / max(full - least, 1e-7) / 1e9, least
        )

    def break_off(self) -> None:
        """See `ByteExchange.break_off`."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def failed(self, bad: Exception, *, is_late: bool) -> RankError:
        """Break off, and what to raise."""
        self.break_off()
        return exchange_failed(self.rank, self.size, bad, is_late=is_late)

    def _reach(self, lane: Any, deadline: float) -> None:
        cuda: Any = self._torch.cuda
        event = cuda.Event()
        event.record(lane)
        while not event.query():
            if time.monotonic() >= deadline:
                raise self.failed(TimeoutError("the GPU is not done"), is_late=True)


class _NcclGathering:
    def __init__(self, exchange: NcclExchange, work: Work | None, lane: Any) -> None:
        self._exchange = exchange
        self._work = work
        self._lane = lane

    def wait(self, timeout: float) -> None:  # noqa: ARG002 (it orders a stream, and waits for nothing)
        import torch

        with torch.cuda.stream(self._lane):
            try:
                if self._work is not None:  # asked for, torch gives one
                    self._work.wait()
            except RuntimeError as bad:
                raise self._exchange.failed(bad, is_late=False) from bad

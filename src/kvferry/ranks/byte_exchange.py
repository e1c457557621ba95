"""How ranks give each other bytes: an all-gather inside a buffer that each of them has."""

from __future__ import annotations

import datetime
import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvferry.errors import ConfigError, MissingDependencyError, RankError, RankTimeoutError
from kvferry.ranks.process_group import disconnect

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup, Work

__all__ = ["ByteExchange", "ExchangeBuffer", "ExchangeRates", "Gathering", "GlooExchange"]

_REPEATS = 3
# Less is the time that an operation takes to start, and not what it carries.
_LEAST_SECONDS = 1e-7


class ExchangeRates(NamedTuple):
    """What was measured of this rank. Rates are GB/s, 10^9 bytes a second."""

    link: float
    """From host memory to the device, over this rank's own link."""

    gather: float
    """What a rank receives of the others in an all-gather."""

    gather_seconds: float
    """What an all-gather of next to nothing takes."""


class ExchangeBuffer(NamedTuple):
    """Memory of the device that ranks exchange bytes in."""

    tensor: Any
    """Keeps it alive."""

    address: int
    num_bytes: int


class Gathering(Protocol):
    """An all-gather that is under way."""

    def wait(self, timeout: float) -> None:
        """Until the bytes of all ranks are there, or until later work of the lane is behind them.

        Raises RankError, or RankTimeoutError after `timeout` seconds.
        """


class ByteExchange(Protocol):
    """Ranks that exchange bytes. All make the same calls in the same order, from one thread.

    After an error it is broken, and so is that of every other rank: no later call works.
    """

    @property
    def rank(self) -> int:
        """Which rank this is, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def device(self) -> str:
        """Where buffers lie, such as ``cpu`` or ``cuda:0``."""

    def buffer(self, num_bytes: int) -> ExchangeBuffer:
        """New memory, filled with zeros."""

    def stream(self, lane: int) -> int | None:
        """The handle of the stream of lane 0 or 1; None in host memory, where there are none."""

    def mark(self, stream: int | None) -> Any:
        """Where the caller's stream (None: the current one) is now. On the caller's thread."""

    def follow(self, mark: Any) -> None:
        """Let both lanes go on only behind `mark`."""

    def gather(
        self, buffer: ExchangeBuffer, chunk_bytes: int, *, lane: int, timeout: float
    ) -> Gathering:
        """Begin to bring all ranks' chunks to all ranks, in place.

        The chunk of rank r is bytes ``[r·chunk_bytes, (r + 1)·chunk_bytes)`` of the buffer.
        Raises as `Gathering.wait`.
        """

    def measure(self, buffer: ExchangeBuffer, *, timeout: float) -> ExchangeRates:
        """What this rank's link and the exchange carry. Raises as `Gathering.wait`."""

    def break_off(self) -> None:
        """Make a failure here that of all ranks; what is under way ends. Never raises."""


class _GlooGathering:
    def __init__(self, work: Work, failed: Callable[[RuntimeError, bool], RankError]) -> None:
        self._work = work
        self._failed = failed

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        try:
            self._work.wait(_whole_millis(timeout))
        except RuntimeError as bad:
            raise self._failed(bad, time.monotonic() >= deadline) from bad


class GlooExchange:
    """`ByteExchange` in host memory, over a gloo group that nothing else uses.

    Make that with ``torch.distributed.new_group(backend="gloo")`` on all ranks. It is another one
    than that of `ProcessGroupRanks`.

    Raises:
        ConfigError: This process is no member of the group, or the group is no gloo group.
        MissingDependencyError: torch is not installed.
    """

    device = "cpu"

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size = member_of(group, "cpu:gloo", "gloo")
        self._group = group

    def buffer(self, num_bytes: int) -> ExchangeBuffer:
        """See `ByteExchange.buffer`."""
        import torch

        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        return ExchangeBuffer(tensor, tensor.data_ptr(), num_bytes)

    def stream(self, lane: int) -> None:
        """None: copies are over when they return."""

    def mark(self, stream: int | None) -> None:
        """None; see `stream`. A stream is refused where the load is checked."""

    def follow(self, mark: Any) -> None:
        """Nothing: there is no stream."""

    def gather(
        self, buffer: ExchangeBuffer, chunk_bytes: int, *, lane: int, timeout: float
    ) -> Gathering:
        """See `ByteExchange.gather`."""
        from torch._C._distributed_c10d import AllgatherOptions  # not among torch's public names

        del lane
        everything = buffer.tensor[: self.size * chunk_bytes]
        own = everything[self.rank * chunk_bytes : (self.rank + 1) * chunk_bytes]
        options = AllgatherOptions()
        options.timeout = _whole_millis(timeout)
        try:
            work = self._group._allgather_base(everything, own, options)
        except RuntimeError as bad:
            raise self._failed(bad, False) from bad
        return _GlooGathering(work, self._failed)

    def measure(self, buffer: ExchangeBuffer, *, timeout: float) -> ExchangeRates:
        """See `ByteExchange.measure`. The link is a plain copy of memory."""
        import torch

        deadline = time.monotonic() + timeout
        source = torch.ones(buffer.num_bytes, dtype=torch.uint8)

        def gathered(chunk_bytes: int) -> None:
            left = max(deadline - time.monotonic(), 0.001)
            self.gather(buffer, chunk_bytes, lane=0, timeout=left).wait(left)

        chunk = buffer.num_bytes // self.size
        link = fastest(lambda: buffer.tensor.copy_(source))
        full, least = fastest(lambda: gathered(chunk)), fastest(lambda: gathered(1))
        received = chunk * (self.size - 1)
        return ExchangeRates(
            buffer.num_bytes / link / 1e9,
            max(received, 1) / max(full - least, _LEAST_SECONDS) / 1e9,
            least,
        )

    def break_off(self) -> None:
        """See `ByteExchange.break_off`."""
        disconnect(self._group)

    def _failed(self, bad: RuntimeError, is_late: bool) -> RankError:
        disconnect(self._group)
        return exchange_failed(self.rank, self.size, bad, is_late=is_late)


def exchange_failed(rank: int, size: int, bad: Exception, *, is_late: bool) -> RankError:
    """What an exchange raises where torch says `bad`."""
    where = f"rank {rank} of {size}"
    if is_late:
        return RankTimeoutError(f"{where}: some rank's bytes did not come in time ({bad})")
    return RankError(f"{where}: the exchange failed ({bad}); a rank is dead, or gave up")


def member_of(group: ProcessGroup, backend: str, name: str) -> tuple[int, int]:
    """This process's rank in `group` and the size of that; raises as `GlooExchange`."""
    try:
        import torch.distributed as dist
    except ImportError as absent:
        raise MissingDependencyError("an exchange needs torch: pip install torch") from absent
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised: call init_process_group, then new_group"
        )
    rank: int = dist.get_rank(group)
    if rank < 0:
        raise ConfigError("this process is no member of the group: exchange among its members only")
    backends = dist.get_backend_config(group)
    if backend not in backends.split(","):
        raise ConfigError(
            f"the group's backends are {backends!r}: make one with "
            f"torch.distributed.new_group(backend={name!r}) for this alone"
        )
    return rank, dist.get_world_size(group)


def fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few; the first, which sets things up, does not count."""
    work()
    best = math.inf
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return max(best, _LEAST_SECONDS)


def _whole_millis(seconds: float) -> datetime.timedelta:
    # What gloo counts in; rounded down it would end before the deadline.
    return datetime.timedelta(milliseconds=math.ceil(max(seconds, 0.001) * 1000))

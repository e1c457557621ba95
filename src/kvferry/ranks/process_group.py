"""Ranks that are processes in a gloo group of torch.distributed."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError, MissingDependencyError, RankError, RankTimeoutError
from kvferry.ranks.agreement import AgreedRanks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GroupCollective", "ProcessGroupRanks", "disconnect"]


def disconnect(group: ProcessGroup) -> None:
    """Make this rank's failure in a gloo group that of the ranks that wait for it.

    gloo itself closes the one connection that failed. A rank that needs nothing of the dead one
    would wait for a rank that does, and that has stopped. abort() does nothing here, but a message
    that does not come in time closes all connections of the group.
    """
    import torch

    for other in range(group.size()):
        if other != group.rank():
            message = torch.empty(1, dtype=torch.int64)
            # Most raise at once: they are closed already.
            with contextlib.suppress(RuntimeError):
                group.recv([message], other, 0).wait(datetime.timedelta(milliseconds=1))


class GroupCollective:
    """`Collective` over a gloo group: one all-reduce of int64 on the CPU each.

    A rank that fails closes its connections to all others, as the system does for a process that
    died. So one failure is everybody's at once, and not at each rank's own deadline.
    """

    def __init__(self, group: ProcessGroup) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ImportError as absent:
            raise MissingDependencyError(
                "ranks that are processes need torch: pip install torch"
            ) from absent
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised: call init_process_group, then new_group"
            )
        self._rank: int = dist.get_rank(group)
        if self._rank < 0:
            raise ConfigError(
                "this process is no member of the group: make ranks in its members only"
            )
        self._size: int = dist.get_world_size(group)
        backends = dist.get_backend_config(group)
        if "cpu:gloo" not in backends.split(","):
            # Others need a GPU for each number, and know no deadline of a single call.
            raise ConfigError(
                f"the group's backends are {backends!r}: make one with "
                f"torch.distributed.new_group(backend='gloo') for kvferry alone"
            )
        self._group = group
        self._torch, self._dist = torch, dist

    @property
    def rank(self) -> int:
        """Which rank of the group this is."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._size

    def all_min(self, values: Sequence[int], *, timeout: float) -> list[int]:
        """The smallest of each value over all ranks; see `Collective.all_min`."""
        deadline = time.monotonic() + timeout
        tensor = self._torch.tensor(values, dtype=self._torch.int64)
        options = self._dist.AllreduceOptions()
        options.reduceOp = self._dist.ReduceOp(self._dist.ReduceOp.MIN)
        # gloo counts this for each message of the operation, the wait for all of it. With the
        # group's own limit, half an hour, an operation that fails would keep its process alive.
        # Whole milliseconds are what it counts; rounded down, it would end before the deadline.
        options.timeout = datetime.timedelta(milliseconds=math.ceil(timeout * 1000))
        try:
            self._group.allreduce([tensor], options).wait(options.timeout)
        except RuntimeError as bad:
            is_late = time.monotonic() >= deadline
            disconnect(self._group)
            where = f"rank {self._rank} of {self._size}"
            # torch has one class for all of it. Whose fault it is, gloo does not know either.
            if is_late:
                raise RankTimeoutError(
                    f"{where}: some rank did not come within {timeout:.3g} s ({bad}); look for one "
                    f"that reports no error"
                ) from bad
            raise RankError(
                f"{where}: the group failed ({bad}); a rank is dead, or gave up: look for the one "
                f"that failed first"
            ) from bad
        return [int(value) for value in tensor.tolist()]

    def close(self) -> None:
        """Nothing: the group belongs to whoever made it."""


class ProcessGroupRanks(AgreedRanks):
    """A rank that is a process in `group`, a gloo group that only kvferry uses.

    Make it with ``torch.distributed.new_group(backend="gloo")``, on all ranks. `close` leaves it as
    it is.

    Raises:
        ConfigError: torch.distributed is not initialised, this process is no member, or the group
            has another backend for the CPU.
        MissingDependencyError: torch is not installed.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(GroupCollective(group))

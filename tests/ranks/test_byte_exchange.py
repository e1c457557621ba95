"""What an exchange refuses, and the watch on processes, with this process alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import ConfigError, MissingDependencyError
from kvferry.ranks import GlooExchange, NcclExchange, ProcessWatch, SingleRank


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """torch.distributed with this process alone, until the test ends."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


def test_groups_that_cannot_exchange_are_refused(alone: Any) -> None:
    """No member, or another backend than the exchange is for, with what to make instead."""
    group = alone.new_group(backend="gloo")
    with pytest.raises(ConfigError, match="no member"):
        GlooExchange(alone.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ConfigError, match=r"gloo.*new_group\(backend='nccl'\)"):
        NcclExchange(group, "cuda:0")


def test_a_gather_of_one_rank_keeps_its_bytes(alone: Any) -> None:
    """In place, and nothing behind the chunk changes."""
    exchange = GlooExchange(alone.new_group(backend="gloo"))
    buffer = exchange.buffer(100)
    assert (buffer.tensor == 0).all()
    buffer.tensor[:] = 7
    exchange.gather(buffer, 3, lane=0, timeout=30).wait(30)
    assert (buffer.tensor == 7).all()
    rates = exchange.measure(buffer, timeout=30)
    assert min(rates) > 0


def test_without_torch_or_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what is missing, and how to get it."""
    with pytest.raises(ConfigError, match="init_process_group"):
        GlooExchange(None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(MissingDependencyError, match="pip install torch"):
        GlooExchange(None)  # type: ignore[arg-type]


class _Two(SingleRank):
    """A rank that agrees with a process of which only the id is known."""

    size = 2

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid

    def agree_min(self, values: Any, *, timeout: float) -> list[int]:
        del timeout
        return [*values[:3], *values[:2], self._pid]


def test_a_process_that_is_killed_is_named() -> None:
    """Not before it is, and with its id. This very process is not watched."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    watch = ProcessWatch(_Two(child), timeout=1)
    assert watch.named(0) == ""
    os.kill(child, signal.SIGKILL)
    assert watch.named(60) == f"rank 1 (process {child}) is gone"
    os.waitpid(child, 0)
    watch.close()
    watch.close()
    assert watch.gone(0) == []
    assert ProcessWatch(SingleRank(), timeout=1).gone(60) == []

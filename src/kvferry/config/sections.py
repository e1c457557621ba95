"""The sections of the config and their defaults. Each field says what it accepts and does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from kvferry.config.kinds import (
    AbsolutePath,
    Backend,
    Count,
    Number,
    OptionMapping,
    OrNone,
    Size,
    StorageAt,
    Switch,
    Word,
)
from kvferry.config.options import Options
from kvferry.config.setting import Section, Setting

__all__ = [
    "ControlConfig",
    "HostConfig",
    "IntegrityConfig",
    "LoadConfig",
    "MetricsConfig",
    "PrefetchConfig",
    "StorageConfig",
    "StoreConfig",
    "TransferConfig",
]

_FRACTION = Number(0, 1, above_minimum=True)
_DAY_SECS = 86_400


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostConfig(Section):
    """The host tier: how much memory, of which kind, and who leaves when it is full."""

    num_bytes: Annotated[
        int | None,
        Setting(
            OrNone(Size(1)),
            "host memory for everything the tier keeps: pages, state checkpoints, digests and "
            "padding of all planes together; none: `device_ratio` decides",
        ),
    ] = None
    device_ratio: Annotated[
        float,
        Setting(
            Number(0, 1000, above_minimum=True),
            "host memory as a multiple of the device pool's bytes, where `num_bytes` is none",
        ),
    ] = 2.5
    state_fraction: Annotated[
        float,
        Setting(
            Number(0, 1, above_minimum=True, below_maximum=True),
            "share of the host memory that state checkpoints get, where the geometry has pages and "
            "states; it is part of the size above, not beside it",
        ),
    ] = 0.1
    huge_pages: Annotated[
        Literal["off", "auto", "required"],
        Setting(
            Word(("off", "auto", "required")),
            "huge pages for the pool: never; where enough are free; or an error where they are not",
        ),
    ] = "auto"
    numa: Annotated[
        Literal["off", "auto"],
        Setting(
            Word(("off", "auto")),
            "put the pool on the memory node of the GPU where that is known, or anywhere",
        ),
    ] = "auto"
    locked: Annotated[
        bool, Setting(Switch(), "keep the pool out of swap; it then counts against the lock limit")
    ] = False
    reserve_bytes: Annotated[
        int | None,
        Setting(
            OrNone(Size(0)),
            "free memory that is left to others; none: a sixteenth of what the machine or the "
            "cgroup has, at most 4 GiB",
        ),
    ] = None
    processes: Annotated[
        int | None,
        Setting(
            OrNone(Count(1, 65_536)),
            "processes of this machine that make such a host tier; each may have its share of what "
            "is free. none: as many as `ranks` says are here, and 1 without ranks",
        ),
    ] = None
    eviction_policy: Annotated[
        Literal["lru", "lfu", "slru", "fifo", "mru", "priority"],
        Setting(
            Word(("lru", "lfu", "slru", "fifo", "mru", "priority")),
            "which pages leave a full tier first, among those that no other page there follows",
        ),
    ] = "lru"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig(Section):
    """Away from the device."""

    enabled: Annotated[
        bool, Setting(Switch(), "store pages at all; can be flipped on a running cache")
    ] = True
    policy: Annotated[
        Literal["write_through", "write_through_selective", "write_back"],
        Setting(
            Word(("write_through", "write_through_selective", "write_back")),
            "store pages when they are computed, when they were hit `selective_hits` times, or "
            "when the engine evicts them",
        ),
    ] = "write_through"
    selective_hits: Annotated[
        int, Setting(Count(1), "hits that make `write_through_selective` store a page")
    ] = 2
    max_queue_pages: Annotated[
        int,
        Setting(
            Count(1),
            "pages that may wait for storage; of more, the newest are dropped and counted",
        ),
    ] = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadConfig(Section):
    """Towards the device."""

    enabled: Annotated[
        bool, Setting(Switch(), "load pages at all; can be flipped on a running cache")
    ] = True
    threshold_tokens: Annotated[
        int, Setting(Count(0), "with fewer tokens to load, computing them again is taken as faster")
    ] = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefetchConfig(Section):
    """From storage to the host, ahead of a load."""

    enabled: Annotated[bool, Setting(Switch(), "prefetch at all")] = True
    policy: Annotated[
        Literal["best_effort", "wait_complete", "timeout"],
        Setting(
            Word(("best_effort", "wait_complete", "timeout")),
            "what a load takes: what has come; all of it, at most `max_secs` later; or what has "
            "come by the deadline below",
        ),
    ] = "timeout"
    threshold_tokens: Annotated[
        int, Setting(Count(0), "with fewer tokens in storage, none is prefetched")
    ] = 256
    timeout_base_secs: Annotated[
        float, Setting(Number(0, _DAY_SECS, "seconds"), "deadline of `timeout`, from submission")
    ] = 1.0
    timeout_secs_per_1024_tokens: Annotated[
        float, Setting(Number(0, _DAY_SECS, "seconds"), "what 1,024 tokens add to that deadline")
    ] = 0.25
    max_secs: Annotated[
        float,
        Setting(
            Number(0, _DAY_SECS, "seconds", above_minimum=True),
            "longest time that a prefetch is waited for, whatever the policy",
        ),
    ] = 30.0
    budget_pages: Annotated[
        int | None,
        Setting(
            OrNone(Count(1)),
            "host pages that all prefetches under way may hold; none: `budget_fraction` decides",
        ),
    ] = None
    budget_fraction: Annotated[
        float,
        Setting(_FRACTION, "the same as a share of the host tier, where `budget_pages` is none"),
    ] = 0.5

    def budget(self, host_pages: int) -> int:
        """How many of `host_pages` prefetches may hold at once: at least 1, where there is one."""
        pages = self.budget_pages
        if pages is None:
            pages = max(int(self.budget_fraction * host_pages), 1)
        return min(pages, host_pages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageConfig(Section):
    """Below the host tier."""

    enabled: Annotated[
        bool, Setting(Switch(), "use storage at all; can be flipped on a running cache")
    ] = False
    url: Annotated[
        str | None,
        Setting(
            OrNone(StorageAt()),
            "where storage is, in one line: in place of `backend` and `path`, and `options` are "
            "added to those of the URL",
        ),
    ] = None
    backend: Annotated[
        str | None,
        Setting(OrNone(Backend()), "what keeps the objects; none: there is no storage tier"),
    ] = "file"
    path: Annotated[
        Path | None,
        Setting(OrNone(AbsolutePath()), "folder of the `file` backend, which needs one"),
    ] = None
    capacity_bytes: Annotated[
        int | None,
        Setting(OrNone(Size(1)), "most that storage may take; none: as the backend does by itself"),
    ] = None
    options: Annotated[
        Options,
        Setting(OptionMapping(), "what else the backend is opened with, for it to check"),
    ] = Options()  # noqa: RUF009  it cannot be changed
    max_hints: Annotated[
        int,
        Setting(
            Count(1, 1 << 26),
            "pages, and checkpoints, that storage is remembered to have, some 250 bytes each; "
            "never fewer than twice the host's slots",
        ),
    ] = 1 << 20
    workers: Annotated[int, Setting(Count(1, 256), "threads that read and write storage")] = 4
    batch_pages: Annotated[
        int, Setting(Count(1, 65_536), "pages of one call to the backend, at most")
    ] = 128
    breaker_failures: Annotated[
        int, Setting(Count(1), "failed calls in a row after which storage is down: nobody asks it")
    ] = 5
    breaker_secs: Annotated[
        float,
        Setting(
            Number(0, _DAY_SECS, "seconds", above_minimum=True),
            "how long until it is tried again, by the cache itself",
        ),
    ] = 30.0

    @property
    def target(self) -> str | None:
        """What `open_backend` takes first: `url`, else `backend`."""
        return self.backend if self.url is None else self.url


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegrityConfig(Section):
    """What is checked."""

    verify: Annotated[
        Literal["always", "storage", "off"],
        Setting(
            Word(("always", "storage", "off")),
            "check digests of every load and checksums of storage; checksums of storage alone; or "
            "nothing",
        ),
    ] = "always"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """What is told."""

    enabled: Annotated[bool, Setting(Switch(), "count and measure; needs prometheus-client")] = (
        False
    )
    window_secs: Annotated[
        float,
        Setting(
            Number(0, _DAY_SECS, "seconds", above_minimum=True),
            "how far back the speed and busy fraction of the link look",
        ),
    ] = 10.0
    max_events: Annotated[
        int,
        Setting(
            Count(0, 10_000_000),
            "events kept until somebody drains them; of more, the oldest are dropped and counted",
        ),
    ] = 16_384


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlConfig(Section):
    """Orders from outside of the process."""

    socket: Annotated[
        Path | None,
        Setting(
            OrNone(AbsolutePath()),
            "where `kvferry ctl` reaches this cache: a Unix socket for its owner alone, of rank n "
            "of several with `.n` behind it; none: nowhere",
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferConfig(Section):
    """Between device and host."""

    staging_bytes: Annotated[
        int,
        Setting(
            Size(0), "device memory for staging, of each direction; 0: the staged mover is not used"
        ),
    ] = 64 << 20
    mover: Annotated[
        Literal["auto", "direct", "staged"],
        Setting(
            Word(("auto", "direct", "staged")),
            "the faster mover for each plan, or this one, or refuse",
        ),
    ] = "auto"

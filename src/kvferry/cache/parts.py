"""The parts of a cache, made as a config says."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from kvferry.config import Config
from kvferry.kernels.jit import process_loader
from kvferry.memory import AttachedHostPool, HostPool, HugePages, split_budget
from kvferry.tiers import PrefetchPolicy, StorePolicy, TierOptions, Verify
from kvferry.transfer import TransferEngine
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from kvferry.geometry import Geometry, PoolView
    from kvferry.memory import MemoryReading

__all__ = ["backend_options", "make_engines", "make_pools", "resolved_config", "tier_options"]


_HUGE_PAGES: Mapping[str, HugePages] = {"off": "never", "auto": "auto", "required": "always"}
_NUMA_NODE: Mapping[str, Literal["auto"] | None] = {"off": None, "auto": "auto"}


class _Budget(TypedDict):
    """How the memory of a pool is judged."""

    reserve_bytes: int | None
    reading: MemoryReading | None
    processes: int


def resolved_config(config: Config | None, overrides: Mapping[str, Mapping[str, Any]]) -> Config:
    """`config` with some settings changed; None: as the environment and its file have it."""
    if config is None:
        return Config.resolve(None, None, **overrides).config
    if not overrides:
        return config
    told = config.to_dict()
    for section, values in overrides.items():
        told[section] = {**told.get(section, {}), **values}
    return Config.resolve(None, {}, **told).config


def backend_options(config: Config) -> dict[str, Any]:
    """What the config's backend is opened with."""
    storage = config.storage
    options: dict[str, Any] = dict(storage.options)
    if storage.path is not None:
        options["path"] = storage.path
    if storage.capacity_bytes is not None:
        options["capacity_bytes"] = storage.capacity_bytes
    return options


def make_pools(
    geometry: Geometry,
    device_pool: PoolView,
    config: Config,
    *,
    shared: bool = False,
    ranks_here: int = 1,
    reading: MemoryReading | None = None,
) -> dict[SlotKind, HostPool]:
    """All pools together take no more than the configured size; `shared` as for `HostPool`.

    Args:
        geometry: The planes.
        device_pool: Where the engine keeps them.
        config: All settings.
        shared: Other processes map the pools.
        ranks_here: How many ranks of this machine make such pools, where the config does not say.
        reading: The memory there was before any of them did; None: it is read now.

    Raises as `HostPool`; NoDeviceError and the like, where the GPU is to be asked where it is.
    """
    host = config.host
    bus_id = None if host.numa == "off" else bus_id_of(device_pool.device)
    # Who shares is judged by what all of them saw: later readings lack what others took meanwhile.
    budget: _Budget = {
        "reserve_bytes": host.reserve_bytes,
        "reading": reading,
        "processes": host.processes or ranks_here,
    }
    sizes = split_budget(
        geometry,
        num_bytes=host.num_bytes,
        device_bytes=device_pool_bytes(device_pool) if host.num_bytes is None else None,
        ratio=host.device_ratio,
        state_fraction=host.state_fraction,
        locked=host.locked,
        huge_pages=_HUGE_PAGES[host.huge_pages],
        **budget,
    )
    pools: dict[SlotKind, HostPool] = {}
    with contextlib.ExitStack() as unless_made:
        for kind in SlotKind:
            if not geometry.spans(kind):
                continue
            pools[kind] = HostPool(
                geometry,
                num_slots=sizes.slots(kind),
                kind=kind,
                locked=host.locked,
                huge_pages=_HUGE_PAGES[host.huge_pages],
                # Memory is near to a device, so without one there is nothing to be near to.
                numa_node=None if bus_id is None else _NUMA_NODE[host.numa],
                device_bus_id=bus_id,
                shared=shared,
                **budget,
            )
            unless_made.callback(pools[kind].close)
        unless_made.pop_all()
    return pools


def bus_id_of(device: str) -> str | None:
    """The PCI address of the GPU that a pool lies on, as its driver has it; None for the CPU.

    The driver is asked, as it numbers GPUs as CUDA_VISIBLE_DEVICES has it, and the system does not.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return None
    return process_loader().driver.context(int(index or 0)).bus_id


def device_pool_bytes(pool: PoolView) -> int:
    """The bytes of KV that a device pool holds."""
    return sum(
        view.num_rows * view.element_size for views in pool.layers.values() for view in views
    )


def make_engines(
    device_pool: PoolView,
    pools: Mapping[SlotKind, HostPool] | Mapping[SlotKind, AttachedHostPool],
    config: Config,
    *,
    verify: bool,
    timed: bool,
) -> dict[SlotKind, TransferEngine]:
    """The engines between the device pool and each host pool; none if one cannot be made."""
    engines: dict[SlotKind, TransferEngine] = {}
    with contextlib.ExitStack() as unless_made:
        for kind, pool in pools.items():
            engines[kind] = _make_engine(device_pool, pool, config, verify=verify, timed=timed)
            unless_made.callback(engines[kind].close)
        unless_made.pop_all()
    return engines


def _make_engine(
    device_pool: PoolView,
    pool: HostPool | AttachedHostPool,
    config: Config,
    *,
    verify: bool,
    timed: bool,
) -> TransferEngine:
    """The engine between the device pool and one of the host pools; `timed` where that is told."""
    if device_pool.device.partition(":")[0] == "cpu":
        return TransferEngine(device_pool, pool, verify=verify)
    mover = config.transfer.mover
    return TransferEngine(
        device_pool,
        pool,
        verify=verify,
        mover=None if mover == "auto" else mover,
        staging_bytes=config.transfer.staging_bytes,
        timed=timed,
    )


def tier_options(
    config: Config, num_slots: int, verify: Verify, *, writes_storage: bool
) -> TierOptions:
    """The config as the tier manager takes it; `num_slots` of the host tier."""
    prefetch, storage = config.prefetch, config.storage
    return TierOptions(
        store_policy=StorePolicy(config.store.policy),
        selective_hits=config.store.selective_hits,
        max_queue_pages=config.store.max_queue_pages,
        writes_storage=writes_storage,
        load_threshold_tokens=config.load.threshold_tokens,
        prefetch=prefetch.enabled,
        prefetch_policy=PrefetchPolicy(prefetch.policy),
        prefetch_threshold_tokens=prefetch.threshold_tokens,
        timeout_base_secs=prefetch.timeout_base_secs,
        timeout_secs_per_1024_tokens=prefetch.timeout_secs_per_1024_tokens,
        prefetch_max_secs=prefetch.max_secs,
        prefetch_budget_pages=prefetch.budget(num_slots),
        max_storage_hints=storage.max_hints,
        batch_pages=storage.batch_pages,
        max_batches=2 * storage.workers,
        breaker_failures=storage.breaker_failures,
        breaker_secs=storage.breaker_secs,
        link_window_secs=config.metrics.window_secs,
        verify=verify,
    )

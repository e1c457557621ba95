"""kvferry's storage as a backend of the engine's HiCache: `KVFerryStorage`.

The engine makes it by name, from what ``--hicache-storage-backend dynamic`` is given. Whatever
happens while it serves is a miss or a page that was not stored, told in the log and counted: what
it raises would end a thread of the engine.
"""

from __future__ import annotations

import collections
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvferry.adapters.sglang.hits import TRAILING_PAGES, PoolRule, prefix_hits
from kvferry.adapters.sglang.stored_pools import StoredPool, StoredPools
from kvferry.config import Config
from kvferry.errors import ConfigError, StorageError
from kvferry.storage import FileBackend, StorageBackend, StorageInspector, open_backend

__all__ = ["KVFerryStorage"]

_logger = logging.getLogger(__name__)

_KV = "kv"
_OURS = ("backend", "path", "capacity_bytes", "options", "verify", "revision")
_MAX_SAMPLES = 4096

Answer = TypeVar("Answer")


class KVFerryStorage(HiCacheStorage):  # type: ignore[misc]  # the engine has no types
    """Pages of the engine's host pools as objects of a `StorageBackend`.

    Args:
        storage_config: The engine's. Its ``extra_config`` has ours under ``kvferry``: ``url``, or
            ``backend`` and ``path``, ``capacity_bytes`` and ``options`` as in the section
            ``storage`` of a `Config`; ``verify`` (default true) compares the checksum of every page
            that is read; ``revision``, any text, keeps apart what the model's name does not.
            ``interface_v1`` beside it lets pages be read and written where they lie.
        kwargs: What else the engine passes; not used.

    Raises:
        ConfigError: A setting is none, or has a value that is not accepted.
        StorageError: The backend cannot be opened.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, object] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        ours = dict(extra.get("kvferry") or {})
        unknown = sorted(set(ours) - set(_OURS))
        if unknown:
            raise ConfigError(
                f"extra config, kvferry: there is no {', '.join(unknown)}; there are "
                f"{', '.join(_OURS)}"
            )
        self._verify = bool(ours.pop("verify", True))
        revision = str(ours.pop("revision", ""))
        self._open = _opener(ours)
        self._backend = self._open()
        self._in_place = bool(extra.get("interface_v1", 0))
        self._identity = {**_identity(storage_config), "revision": revision}
        self._shard = (int(storage_config.tp_rank), int(storage_config.tp_size))
        self._replicates = bool(storage_config.is_mla_model)
        self._host_pools: dict[str, Any] = {}
        self._pools = self._new_pools()
        self.failures: collections.Counter[str] = collections.Counter()
        """Calls that failed as a whole, by method."""

        self._samples: dict[str, list[float]] = collections.defaultdict(list)
        _logger.info(
            "kvferry keeps pages in %s, %s", type(self._backend).__name__,
            "where they lie" if self._in_place
            else "by way of copies: set interface_v1 to 1 in the extra config to do without",
        )  # fmt: skip

    def _new_pools(self) -> StoredPools:
        return StoredPools(
            self._backend,
            self._identity,
            shard=self._shard,
            replicates=self._replicates,
            in_place=self._in_place,
            verify=self._verify,
        )

    @property
    def pools(self) -> StoredPools:
        """What is registered: keys, fingerprints, and what went wrong with pages."""
        return self._pools

    # ------------------------------------------------------------------------------- set-up

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take in the pool of KV; StorageError where its pages cannot be told."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take in a pool by its name; the same one again changes nothing."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(_name(host_pool_name), host_pool)

    def _register(self, name: str, host_pool: Any) -> None:
        if self._host_pools.get(name) is not host_pool:
            self._pools.register(name, host_pool)
            self._host_pools[name] = host_pool

    # ----------------------------------------------------------------------- what is there

    def exists(self, key: str) -> bool:
        """Whether KV of `key` is there; a read may still miss."""
        return bool(self.batch_exists([key]))

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages of KV are there."""

        def count() -> int:
            return prefix_hits(self._pools.contains(_KV, keys), {}).num_pages

        return self._calm("batch_exists", 0, count)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[Any] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        """The longest prefix that KV and the pools of `pool_transfers` can serve together."""

        def look() -> PoolTransferResult:
            asked = {}
            for transfer in pool_transfers or ():
                name = _name(transfer.name)
                policy = _name(transfer.hit_policy)
                trailing = max(1, len(transfer.keys or ())) if policy == TRAILING_PAGES else 1
                asked[name] = (PoolRule(policy, trailing), self._pools.contains(name, keys))
            found = prefix_hits(self._pools.contains(_KV, keys), asked)
            return PoolTransferResult(found.num_pages, found.by_pool, found.restorable)

        return self._calm("batch_exists_v2", PoolTransferResult(0, {}, []), look)

    # ---------------------------------------------------------------- pages where they lie

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Read pages of KV to where `host_indices` are; which of them are whole."""
        return self._calm(
            "batch_get_v1", [False] * len(keys), lambda: self._get(_KV, keys, host_indices)
        )

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of KV from where `host_indices` are; which of them are stored."""
        return self._calm(
            "batch_set_v1", [False] * len(keys), lambda: self._set(_KV, keys, host_indices)
        )

    def batch_get_v2(
        self,
        transfers: Sequence[Any],
        extra_info: Any = None,
    ) -> dict[Any, list[bool]]:
        """As `batch_get_v1`, for several pools; each counts by itself."""
        return self._each("batch_get_v2", transfers, self._get)

    def batch_set_v2(
        self,
        transfers: Sequence[Any],
        extra_info: Any = None,
    ) -> dict[Any, list[bool]]:
        """As `batch_set_v1`, for several pools; each counts by itself."""
        return self._each("batch_set_v2", transfers, self._set)

    def _each(
        self,
        method: str,
        transfers: Sequence[Any],
        move: Callable[[str, list[str], Any], list[bool]],
    ) -> dict[Any, list[bool]]:
        results = {}
        for transfer in transfers:
            keys = list(transfer.keys or ())
            call = functools.partial(move, _name(transfer.name), keys, transfer.host_indices)
            results[transfer.name] = self._calm(method, [False] * len(keys), call)
        return results

    def _get(self, name: str, keys: list[str], host_indices: Any) -> list[bool]:
        return self._moved("prefetch", name, keys, lambda pool: pool.read(keys, host_indices))

    def _set(self, name: str, keys: list[str], host_indices: Any) -> list[bool]:
        return self._moved("backup", name, keys, lambda pool: pool.write(keys, host_indices))

    # ---------------------------------------------------------------------- copies of pages

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """A page of KV in `target_location`, a tensor of the page's length; None: a miss."""
        found = self.batch_get([key], None if target_location is None else [target_location],
                               target_sizes)  # fmt: skip
        return found[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[Any] | None = None,
        target_sizes: Any = None,  # a tensor has its own
    ) -> list[Any]:
        """As `get`, for several pages."""

        def read() -> list[Any]:
            pages = target_locations
            if pages is None:
                pages = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
            read = self._moved("prefetch", _KV, keys, lambda pool: pool.read_copies(keys, pages))
            return [page if ok else None for page, ok in zip(pages, read, strict=True)]

        return self._calm("batch_get", [None] * len(keys), read)

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store the tensor `value`, of a page's length, as a page of KV."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[Any] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """As `set`, for several pages; whether all of them are stored."""

        def write() -> bool:
            pages = list(values or ())
            if len(pages) != len(keys):
                raise StorageError(f"{len(keys)} keys and {len(pages)} values: give one for each")
            return all(
                self._moved("backup", _KV, keys, lambda pool: pool.write_copies(keys, pages))
            )

        return self._calm("batch_set", False, write)

    # ------------------------------------------------------------------------ administration

    def clear(self) -> bool:
        """Remove every object of the backend, whoever stored it; whether that was done.

        kvferry's own backends can; another class keeps its objects.
        """

        def empty() -> bool:
            if isinstance(self._backend, FileBackend):
                folder = StorageInspector(self._backend.path)
                folder.prune(max_bytes=0, used_before_ns=None, dry_run=False)
                self._backend.close()
            elif type(self._backend).__module__ != "kvferry.storage.memory":
                _logger.warning(
                    "%s cannot be emptied by kvferry; use its own means", type(self._backend)
                )
                return False
            self._backend = self._open()
            self._pools = pools = self._new_pools()
            for name, host_pool in self._host_pools.items():
                pools.register(name, host_pool)
            return True

        return self._calm("clear", False, empty)

    def get_stats(self) -> Any:
        """Pages and GB/s of each batch since the last call, as the engine's metrics take them."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        samples, self._samples = self._samples, collections.defaultdict(list)
        return StorageMetrics(
            prefetch_pgs=[int(pages) for pages in samples["prefetch_pgs"]],
            backup_pgs=[int(pages) for pages in samples["backup_pgs"]],
            prefetch_bandwidth=samples["prefetch_bandwidth"],
            backup_bandwidth=samples["backup_bandwidth"],
        )

    def close(self) -> None:
        """Close the backend; calls after it miss."""
        self._calm("close", None, self._backend.close)

    # ---------------------------------------------------------------------------- machinery

    def _moved(
        self, what: str, name: str, keys: Sequence[str], move: Callable[[StoredPool], list[bool]]
    ) -> list[bool]:
        pool = self._pools.pool(name)
        if pool is None or not keys:
            return [True] * len(keys)
        begun = time.perf_counter()
        done = move(pool)
        seconds = time.perf_counter() - begun
        pages = sum(done)
        if seconds > 0 and len(self._samples[f"{what}_pgs"]) < _MAX_SAMPLES:
            self._samples[f"{what}_pgs"].append(pages)
            gigabytes = pages * pool.objects.payload_bytes / 1e9
            self._samples[f"{what}_bandwidth"].append(gigabytes / seconds)
        return done

    def _calm(self, method: str, failed: Answer, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except Exception:  # the border: the engine's thread must live
            self.failures[method] += 1
            _logger.exception("%s failed; the engine is told of a miss", method)
            return failed


def _name(given: Any) -> str:
    """A pool or policy, which the engine has as a text or as an enumeration of texts."""
    return str(getattr(given, "value", given))


def _opener(ours: Mapping[str, object]) -> Callable[[], StorageBackend]:
    config = Config.resolve(None, None, storage={"enabled": True, **ours}).config
    name = config.storage.target
    if name is None:
        raise ConfigError("extra config, kvferry: backend is none, and one is needed")
    options: dict[str, Any] = dict(config.storage.options)
    if config.storage.path is not None:
        options["path"] = config.storage.path
    if config.storage.capacity_bytes is not None:
        options["capacity_bytes"] = config.storage.capacity_bytes
    return lambda: open_backend(name, **options)


def _identity(storage_config: Any) -> dict[str, object]:
    """What the engine says of its model and ranks that its own keys do not have."""
    told: dict[str, object] = {
        name: getattr(storage_config, name, None)
        for name in ("model_name", "is_mla_model", "should_split_heads", "tp_lcm_size")
    }
    for kind in ("pp", "attn_cp", "dcp"):
        told[kind] = [getattr(storage_config, f"{kind}_{part}", None) for part in ("rank", "size")]
    told["engine"] = _engine_settings()
    return told


def _engine_settings() -> dict[str, str]:
    """Settings of the running engine that change bytes and nothing that a host pool tells.

    A quantised pool is one of plain bytes, whatever the kind of its numbers.
    """
    try:
        from sglang.srt.runtime_context import get_server_args

        arguments = get_server_args()
    except (ImportError, RuntimeError, ValueError, AttributeError):
        return {}  # made outside of an engine
    names = ("revision", "kv_cache_dtype", "quantization", "dtype")
    return {name: str(getattr(arguments, name, "")) for name in names}

"""The host pools of an engine in a storage backend: a key of ours for every page of every pool.

A page is an object, whatever number of buffers it lies in. Nothing of the engine is imported here:
a pool is anything with the methods that its storage backends call.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvferry.errors import StorageError
from kvferry.storage import Buffers, CheckedObjects, PageStoreCounts, StorageBackend

__all__ = ["StoredPool", "StoredPools", "object_key"]

_logger = logging.getLogger(__name__)

_FORMAT = 1
"""Goes up when the bytes of a page would lie otherwise in its object."""

_HASH = re.compile(r"[0-9a-f]{64}")

# What makes equal bytes mean something else, as far as host pools tell.
_TYPES = ("dtype", "indexer_dtype", "conv_dtype", "temporal_dtype")
_SHAPES = (
    *("layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "num_mamba_layers"),
    *("size_per_token", "storage_format_tag"),
)


def object_key(fingerprint: str, key: str) -> bytes:
    """The key in storage of what the engine calls `key` in the pool of `fingerprint`.

    The engine's hashes are kept as they are; other keys are hashed, and told apart by their length.
    """
    begin = bytes.fromhex(fingerprint)
    if _HASH.fullmatch(key):
        return begin + bytes.fromhex(key)
    return begin + b"\0" + hashlib.sha256(key.encode()).digest()


class StoredPool:
    """The pages of one host pool.

    Args:
        name: What the engine calls the pool.
        pool: The engine's. ``page_size`` tokens are a page, of ``logical_page_size`` indices.
        backend: Where the objects are.
        identity: What else the fingerprint is made of.
        in_place: Read and write pages where they lie, if the pool can tell where that is.
        verify: Compare the checksum of what is read.
    """

    def __init__(
        self,
        name: str,
        pool: Any,
        backend: StorageBackend,
        identity: Mapping[str, object],
        *,
        in_place: bool,
        verify: bool,
    ) -> None:
        self.name = name
        self.page_tokens = int(getattr(pool, "logical_page_size", None) or pool.page_size or 1)
        self._pool = pool
        self.why_copied = "" if in_place else "the engine hands over copies of its pages"
        """Why pages are copied on their way; empty where they are not."""

        sizes: tuple[int, ...] = ()
        if in_place:
            try:
                sizes = tuple(size for _, size in self._places(np.arange(self.page_tokens))[0])
            except Exception as refused:  # noqa: BLE001  the engine's code: whatever it raises
                self.why_copied = f"the pool does not tell where its pages lie: {refused}"
        if self.why_copied:
            page = pool.get_dummy_flat_data_page()
            sizes = (page.numel() * page.element_size(),)
        self.fingerprint = _fingerprint(
            {
                **identity,
                "format": _FORMAT,
                "pool": name,
                "page_tokens": self.page_tokens,
                "layout": str(getattr(pool, "layout", "")),
                "in_place": not self.why_copied,
                "buffers": sizes,
                **{name: str(getattr(pool, name, "")) for name in (*_TYPES, *_SHAPES)},
            }
        )
        self.objects = CheckedObjects(
            backend, fingerprint=self.fingerprint, payload_bytes=sum(sizes), verify=verify
        )

    def keys(self, keys: Iterable[str]) -> list[bytes]:
        """What the engine's `keys` are called in storage."""
        return [object_key(self.fingerprint, key) for key in keys]

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Which pages there are."""
        return self.objects.contains(self.keys(keys))

    def read(self, keys: Sequence[str], indices: Any) -> list[bool]:
        """Read each page to where its indices lie, ``page_tokens`` of `indices` a key."""
        starts = self._starts(keys, indices)
        if not self.why_copied:
            places = self._places(_whole(starts, self.page_tokens))
            return [result.ok for result in self.objects.read_objects(self.keys(keys), places)]
        pages = [self._pool.get_dummy_flat_data_page() for _ in keys]
        read = self.read_copies(keys, pages)
        for start, page, ok in zip(starts, pages, read, strict=True):
            if ok:
                self._pool.set_from_flat_data_page(int(start), page)
        return read

    def write(self, keys: Sequence[str], indices: Any) -> list[bool]:
        """Store each page that storage lacks, from where its indices lie."""
        starts = self._starts(keys, indices)
        there = self.contains(keys)
        missing = [number for number, is_there in enumerate(there) if not is_there]
        if not missing:
            return there
        kept: Any = None
        if self.why_copied:
            kept = [self._pool.get_data_page(int(starts[at]), flat=True) for at in missing]
            payloads, kept = _tensors_as_buffers(kept)
        else:
            payloads = self._places(_whole(starts[missing], self.page_tokens))
        return self._put(there, missing, keys, payloads)

    def read_copies(self, keys: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        """Read each page into a tensor of the caller's; one of another length is no page."""
        good = [at for at, page in enumerate(pages) if self._is_page(page) and page.is_contiguous()]
        payloads, _kept = _tensors_as_buffers([pages[at] for at in good])
        results = self.objects.read_objects(self.keys(keys[at] for at in good), payloads)
        read = [False] * len(keys)
        for at, result in zip(good, results, strict=True):
            read[at] = result.ok
        return read

    def write_copies(self, keys: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        """Store each tensor that storage lacks; one of another length is refused."""
        there = self.contains(keys)
        missing = [at for at, page in enumerate(pages) if not there[at] and self._is_page(page)]
        payloads, _kept = _tensors_as_buffers([pages[at] for at in missing])
        return self._put(there, missing, keys, payloads)

    def _put(
        self,
        there: list[bool],
        missing: Sequence[int],
        keys: Sequence[str],
        payloads: Sequence[Buffers],
    ) -> list[bool]:
        results = self.objects.write_objects(self.keys(keys[at] for at in missing), payloads)
        for at, result in zip(missing, results, strict=True):
            there[at] = result.ok
        return there

    def _is_page(self, page: Any) -> bool:
        on_host = getattr(page, "is_cuda", None) is False
        return on_host and page.numel() * page.element_size() == self.objects.payload_bytes

    def _starts(self, keys: Sequence[str], indices: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The first index of each page, where all of a page follow on it."""
        whole = np.asarray(indices.cpu() if hasattr(indices, "cpu") else indices, dtype=np.int64)
        if whole.size != len(keys) * self.page_tokens:
            raise StorageError(
                f"pool {self.name!r}: {whole.size} indices for {len(keys)} pages of "
                f"{self.page_tokens}; give all indices of every page"
            )
        pages = whole.reshape(len(keys), self.page_tokens)
        starts = pages[:, 0]
        if (pages != starts[:, None] + np.arange(self.page_tokens)).any() or (
            starts % self.page_tokens
        ).any():
            raise StorageError(
                f"pool {self.name!r}: indices that are no whole pages of {self.page_tokens} in "
                f"order; give those of the host pool's allocator"
            )
        return starts

    def _places(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> list[Buffers]:
        """Where the pages of `indices` lie, as the pool says."""
        import torch

        addresses, sizes = self._pool.get_page_buffer_meta(torch.from_numpy(indices))
        num_pages = len(indices) // self.page_tokens
        each, rest = divmod(len(addresses), num_pages)
        if rest or not each or len(sizes) != len(addresses):
            raise StorageError(
                f"pool {self.name!r} names {len(addresses)} places and {len(sizes)} sizes for "
                f"{num_pages} pages; it must name as many for each"
            )
        pairs = [(int(at), int(size)) for at, size in zip(addresses, sizes, strict=True)]
        return [pairs[page * each : (page + 1) * each] for page in range(num_pages)]


class StoredPools:
    """All host pools of one engine, by name. Thread-safe.

    Args:
        backend: Where the objects are; it stays the caller's.
        identity: Of the model and its parallel layout, for the fingerprint of every pool.
        shard: Which part of a pool that is split over tensor parallel ranks is this rank's.
        replicates: Every rank has the same bytes, but for pools that say otherwise.
        in_place: As for `StoredPool`.
        verify: As for `StoredPool`.
    """

    def __init__(
        self,
        backend: StorageBackend,
        identity: Mapping[str, object],
        *,
        shard: tuple[int, int],
        replicates: bool,
        in_place: bool,
        verify: bool,
    ) -> None:
        self._backend = backend
        self._identity = dict(identity)
        self._shard = shard
        self._replicates = replicates
        self._in_place = in_place
        self._verify = verify
        self._pools: dict[str, StoredPool | None] = {}
        self._lock = threading.Lock()

    def register(self, name: str, pool: Any) -> None:
        """Take a pool in; one of that name before it is forgotten."""
        if getattr(pool, "kv_buffer", pool) is None:
            # Nothing lies in it: the pools beside it have all bytes, and what they lack counts.
            with self._lock:
                self._pools[name] = None
            return
        # Heads and states are split over the ranks, also where the latent is not.
        is_split = not self._replicates or name == "mamba" or hasattr(pool, "head_num")
        stored = StoredPool(
            name,
            pool,
            self._backend,
            {**self._identity, "shard": list(self._shard) if is_split else None},
            in_place=self._in_place,
            verify=self._verify,
        )
        if stored.why_copied and self._in_place:
            _logger.warning("pages of pool %r are copied: %s", name, stored.why_copied)
        with self._lock:
            self._pools[name] = stored

    def pool(self, name: str) -> StoredPool | None:
        """The pool `name`; None where it is one without bytes. StorageError where there is none."""
        with self._lock:
            if name not in self._pools:
                raise StorageError(
                    f"pool {name!r} was not registered; there are {sorted(self._pools)}"
                )
            return self._pools[name]

    def contains(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Which pages of pool `name` there are."""
        pool = self.pool(name)
        return [True] * len(keys) if pool is None else pool.contains(keys)

    @property
    def all(self) -> dict[str, StoredPool]:
        """Those with bytes, by name."""
        with self._lock:
            return {name: pool for name, pool in self._pools.items() if pool is not None}

    def counts(self) -> dict[str, PageStoreCounts]:
        """What went wrong so far, by pool."""
        return {name: pool.objects.counts() for name, pool in self.all.items()}


def _whole(
    starts: np.ndarray[Any, np.dtype[np.int64]], page_tokens: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    return (starts[:, None] + np.arange(page_tokens, dtype=np.int64)).ravel()


def _tensors_as_buffers(pages: Sequence[Any]) -> tuple[list[Buffers], list[Any]]:
    """Where tensors lie, and what keeps that memory: they themselves, or contiguous copies."""
    kept = [page.contiguous() for page in pages]
    return [[(page.data_ptr(), page.numel() * page.element_size())] for page in kept], kept


def _fingerprint(identity: Mapping[str, object]) -> str:
    told = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(told.encode()).hexdigest()[:32]

"""Whole pages of a prefix: stored, loaded into a new cache, dropped. P is tokens a page."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from kvferry.adapters.transformers.cache_shape import CacheShape, empty_cache, fill_cache
from kvferry.errors import PlanError, SlotOwnershipError
from kvferry.geometry import DEFAULT_PAGE_SIZE, Geometry
from kvferry.memory import HostPool, SlotOwner
from kvferry.transfer import TransferEngine, TransferPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Moved", "PrefixCarrier", "RestoredPrefix", "StoredPrefix"]

_KEY_BYTES = 32


class Moved(NamedTuple):
    """What a store or a load moved, and what the whole call took."""

    num_bytes: int
    seconds: float
    path: str
    """`TransferHandle.path`; empty where nothing had to move."""


@dataclasses.dataclass(frozen=True, eq=False)
class StoredPrefix:
    """The whole pages of a prefix. The carrier that stored them keeps them until it drops them."""

    page_keys: tuple[bytes, ...]
    """One a page. Each stands for its page's tokens and all tokens before them."""

    slots: tuple[int, ...]
    """The host slot of each page."""

    num_tokens: int
    """A multiple of P; 0 where the prefix was shorter than a page."""

    moved: Moved

    @property
    def num_pages(self) -> int:
        """How many pages are kept."""
        return len(self.slots)


@dataclasses.dataclass(frozen=True, eq=False)
class RestoredPrefix:
    """A cache that holds the first `num_tokens` tokens and nothing else."""

    cache: Any
    """A new `DynamicCache`; it is the caller's."""

    num_tokens: int
    """A multiple of P. Compute from this token on."""

    num_pages: int
    """How many pages were loaded; more than are in `cache` where one was refused."""

    bad_pages: tuple[int, ...]
    """Those of the loaded pages whose bytes are not what was stored, ascending."""

    moved: Moved


class PrefixCarrier:
    """Keeps prefixes of one model's caches in a host pool. Belongs to one thread.

    Args:
        cache: A cache the model filled with a token or more: it tells the planes. It is not kept.
        config: The model's own config; restored caches are made from it.
        model_id: What else makes caches differ: the model's name, revision and adapters.
        num_bytes: The most the host pool may take.
        page_size: P.

    Raises:
        MissingDependencyError: torch or transformers is not installed.
        GeometryError: A layer of the cache, or of a cache made from `config`, is of a kind that is
            not served; the message names the layer and its class.
        ViewError: The cache is empty, or holds more than one sequence.
        ConfigError, BudgetError: As for `HostPool`.
    """

    def __init__(
        self,
        cache: Any,
        *,
        config: Any,
        model_id: str,
        num_bytes: int,
        page_size: int = DEFAULT_PAGE_SIZE,
    ) -> None:
        self._shape = CacheShape.of(cache)
        self._config = config
        self._new_cache()  # a config that is not served must fail here, not in a later load
        self._geometry = Geometry(planes=self._shape.planes, page_size=page_size)
        told = (self._geometry.fingerprint, model_id, self._shape)
        self._namespace = _digest(repr(told).encode())
        self._pool = HostPool(self._geometry, num_bytes=num_bytes)
        self._kept: set[StoredPrefix] = set()

    @property
    def geometry(self) -> Geometry:
        """The planes: ``k`` and ``v``, numbered where layers differ in width."""
        return self._geometry

    @property
    def pool(self) -> HostPool:
        """Where the pages are kept."""
        return self._pool

    def store(self, cache: Any, token_ids: Any) -> StoredPrefix | None:
        """Keep the whole pages that `cache` holds of `token_ids`; None: too few slots are free.

        Args:
            cache: A `DynamicCache` of the carrier's model. It is only read.
            token_ids: Shape ``[T]`` or ``[1, T]``: the tokens the cache was computed from, from the
                first one on. Tokens beyond what the cache holds are left out.

        Raises:
            ViewError, GeometryError: The cache is not of the shape that the carrier was made for.
            PlanError: `token_ids` are not the whole numbers of one sequence.
            TransferError: The copy failed; nothing is kept.
        """
        started = time.perf_counter()
        tensors = self._shape.tensors(cache)
        num_cached = min(pair[0].shape[2] for pair in tensors if pair)
        keys = self._page_keys(_tokens(token_ids)[:num_cached])
        if not keys:
            return self._keep((), (), Moved(0, time.perf_counter() - started, ""))
        runs = self._pool.allocate(len(keys), SlotOwner.TRANSFER)
        if runs is None:
            return None
        slots = tuple(slot for run in runs for slot in run.slots)
        is_stored = False
        try:
            plan = TransferPlan.store(
                self._geometry,
                host_slots=slots,
                device_slots=self._token_slots(len(keys)),
                page_keys=keys,
            )
            view = self._shape.pool_view(self._geometry, tensors)
            handle = TransferEngine(view, self._pool).store(plan)
            handle.wait()
            self._pool.hand_over(runs, SlotOwner.TRANSFER, SlotOwner.INDEX)
            is_stored = True
        finally:
            if not is_stored:
                self._pool.free(runs, SlotOwner.TRANSFER)
        seconds = time.perf_counter() - started
        return self._keep(keys, slots, Moved(plan.num_bytes, seconds, handle.path))

    def load(self, stored: StoredPrefix, token_ids: Any = None) -> RestoredPrefix:
        """A new cache with the leading pages of `stored`, up to the first that is not verified.

        Args:
            stored: From this carrier's `store`.
            token_ids: Shape ``[T]`` or ``[1, T]``: the prompt to go on with. Only pages of these
                very tokens are loaded, and never the last token: the model has to compute one.
                None: all of `stored`.

        Raises:
            SlotOwnershipError: `stored` was dropped, or is another carrier's.
            PlanError: `token_ids` are not the whole numbers of one sequence.
            TransferError: The copy failed.
        """
        started = time.perf_counter()
        self._check_kept(stored)
        cache = self._new_cache()
        pages = self._num_common_pages(stored, token_ids)
        if not pages:
            return RestoredPrefix(cache, 0, 0, (), Moved(0, time.perf_counter() - started, ""))
        plan = TransferPlan.load(
            self._geometry,
            host_slots=stored.slots[:pages],
            device_slots=self._token_slots(pages),
            page_keys=stored.page_keys[:pages],
        )
        tensors = self._shape.empty_tensors(pages * self._geometry.page_size)
        view = self._shape.pool_view(self._geometry, tensors)
        handle = TransferEngine(view, self._pool).load(plan)
        handle.wait()
        num_tokens = handle.verified_pages * self._geometry.page_size
        if num_tokens:
            fill_cache(cache, tensors, num_tokens)
        moved = Moved(plan.num_bytes, time.perf_counter() - started, handle.path)
        return RestoredPrefix(cache, num_tokens, pages, handle.bad_pages, moved)

    def drop(self, stored: StoredPrefix) -> None:
        """Give the slots of `stored` back; SlotOwnershipError if that was done before."""
        self._check_kept(stored)
        self._pool.free(stored.slots, SlotOwner.INDEX)
        self._kept.remove(stored)

    def close(self) -> None:
        """Give the memory back, with all that is stored; a second call does nothing."""
        self._pool.close()
        self._kept.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.__exit__(exc_type, exc, traceback)
        self._kept.clear()

    def _new_cache(self) -> Any:
        return empty_cache(self._config, len(self._shape.layers))

    def _keep(self, keys: Sequence[bytes], slots: tuple[int, ...], moved: Moved) -> StoredPrefix:
        num_tokens = len(slots) * self._geometry.page_size
        stored = StoredPrefix(tuple(keys), slots, num_tokens, moved)
        self._kept.add(stored)
        return stored

    def _check_kept(self, stored: StoredPrefix) -> None:
        if stored not in self._kept:
            raise SlotOwnershipError(
                f"this prefix of {stored.num_pages} pages is not kept here: it was dropped, or "
                f"another carrier stored it; store it anew"
            )

    def _num_common_pages(self, stored: StoredPrefix, token_ids: Any) -> int:
        if token_ids is None:
            return stored.num_pages
        keys = self._page_keys(_tokens(token_ids)[:-1])
        pairs = zip(keys, stored.page_keys, strict=False)
        # Keys are chained: after the first that differs none is equal.
        return sum(one == other for one, other in pairs)

    def _token_slots(self, pages: int) -> NDArray[np.int64]:
        return np.arange(pages * self._geometry.page_size, dtype=np.int64)

    def _page_keys(self, tokens: NDArray[np.int64]) -> list[bytes]:
        keys: list[bytes] = []
        key, size = self._namespace, self._geometry.page_size
        for start in range(0, len(tokens) - size + 1, size):
            key = _digest(key + tokens[start : start + size].astype("<i8").tobytes())
            keys.append(key)
        return keys


def _digest(told: bytes) -> bytes:
    return hashlib.blake2b(told, digest_size=_KEY_BYTES).digest()


def _tokens(token_ids: Any) -> NDArray[np.int64]:
    array = np.asarray(token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PlanError(
            f"token_ids of shape {array.shape} and type {array.dtype} are no sequence of whole "
            f"numbers; pass the tokens of one sequence, shape [T] or [1, T]"
        )
    return array.astype(np.int64)

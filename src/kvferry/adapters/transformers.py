"""Hugging Face transformers: prefixes of prompts, kept in host memory between calls.

    carrier = PrefixCarrier(cache, config=model.config, model_id="...", num_bytes=1 << 30)
    stored = carrier.store(cache, token_ids)  # None: the pool is full
    restored = carrier.load(stored, next_prompt)
    rest = next_prompt[:, restored.num_tokens :]
    model(rest, **{cache_keyword(model): restored.cache})

Served are caches of one sequence, on the CPU, whose layers keep a key and a value for every token:
`DynamicCache` without windows and recurrent states. Letters: H heads, T tokens, D bytes or numbers
a head, P tokens a page.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from kvferry.errors import GeometryError, MissingDependencyError, PlanError, SlotOwnershipError, ViewError
from kvferry.geometry import DEFAULT_PAGE_SIZE, Geometry, Plane, PoolView
from kvferry.memory import HostPool, SlotOwner
from kvferry.transfer import TransferEngine, TransferPlan

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["LayerShape", "Moved", "PrefixCarrier", "RestoredPrefix", "StoredPrefix", "cache_keyword"]

_TOKEN_DIM = 2
_KEY_BYTES = 32


class LayerShape(NamedTuple):
    """What one layer of a cache keeps of a token. Keys and values may differ."""

    key: tuple[int, int]
    """(H, D) of the keys; MLA caches its latent here, with one head."""

    value: tuple[int, int]
    """(H, D) of the values; MLA caches its rotary part here."""

    key_dtype: torch.dtype
    value_dtype: torch.dtype

    @property
    def element_sizes(self) -> tuple[int, int]:
        """The bytes of a token's key and of its value."""
        return (
            self.key[0] * self.key[1] * self.key_dtype.itemsize,
            self.value[0] * self.value[1] * self.value_dtype.itemsize,
        )


class Moved(NamedTuple):
    """What a store or load moved, and what the whole call cost."""

    num_bytes: int
    seconds: float
    path: str
    """`TransferHandle.path`; empty where nothing had to move."""


@dataclasses.dataclass(frozen=True, eq=False)
class StoredPrefix:
    """The whole pages of a prefix, kept by the carrier that stored it until it drops them."""

    page_keys: tuple[bytes, ...]
    """One a page. Each names its page's tokens and all tokens before them."""

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
    """A new `DynamicCache`, the caller's own."""

    num_tokens: int
    """A multiple of P. Compute from this token on."""

    num_pages: int
    """How many pages were asked for; those from `num_tokens` on were refused."""

    bad_pages: tuple[int, ...]
    """The pages, of those asked for, whose bytes are not what was stored."""

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
        self._config = config
        self._shapes = _layer_shapes(cache)
        served = _check_layers(self._new_cache())
        if len(served) != len(self._shapes):
            raise GeometryError(
                f"the cache has {len(self._shapes)} layers, but config makes {len(served)}; pass "
                f"a cache and the config of one model"
            )
        self._planes_of = _planes_of(self._shapes)
        self._geometry = Geometry(planes=_planes(self._planes_of, self._shapes), page_size=page_size)
        self._namespace = _namespace(self._geometry, model_id, self._shapes)
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
                first on. Those beyond what the cache holds are left out.

        Raises:
            ViewError, GeometryError: The cache is not of the shape the carrier was made for.
            PlanError: `token_ids` are no whole numbers of one sequence.
            TransferError: The copy failed; nothing is kept.
        """
        started = time.perf_counter()
        tensors, num_cached = self._tensors(cache)
        tokens = _tokens(token_ids)
        keys = self._page_keys(tokens[:num_cached])
        if not keys:
            return self._keep(keys, (), Moved(0, time.perf_counter() - started, ""))
        runs = self._pool.allocate(len(keys), SlotOwner.TRANSFER)
        if runs is None:
            return None
        owner = SlotOwner.TRANSFER
        slots = tuple(slot for run in runs for slot in run.slots)
        try:
            handle = self._engine(tensors).store(
                TransferPlan.store(
                    self._geometry,
                    host_slots=slots,
                    device_slots=self._rows(len(keys)),
                    page_keys=keys,
                )
            )
            handle.wait()
            self._pool.hand_over(runs, owner, SlotOwner.INDEX)
            owner = SlotOwner.INDEX
        finally:
            if owner is SlotOwner.TRANSFER:
                self._pool.free(runs, owner)
        seconds = time.perf_counter() - started
        return self._keep(keys, slots, Moved(handle.plan.num_bytes, seconds, handle.path))

    def load(self, stored: StoredPrefix, token_ids: Any = None) -> RestoredPrefix:
        """A new cache with the leading pages of `stored`, up to the first that is not verified.

        Args:
            stored: From this carrier's `store`.
            token_ids: Shape ``[T]`` or ``[1, T]``: the prompt to go on with. Only pages of the very
                same tokens are loaded, and never the last token, which the model needs to compute.
                None: all of `stored`.

        Raises:
            SlotOwnershipError: `stored` was dropped, or is another carrier's.
            PlanError: `token_ids` are no whole numbers of one sequence.
            TransferError: The copy failed.
        """
        started = time.perf_counter()
        self._check_kept(stored)
        pages = stored.num_pages
        if token_ids is not None:
            keys = self._page_keys(_tokens(token_ids)[:-1])
            same = [one == other for one, other in zip(stored.page_keys, keys, strict=False)]
            pages = same.index(False) if False in same else len(same)
        cache = self._new_cache()
        if not pages:
            return RestoredPrefix(cache, 0, 0, (), Moved(0, time.perf_counter() - started, ""))
        tensors = self._empty_tensors(pages * self._geometry.page_size)
        handle = self._engine(tensors).load(
            TransferPlan.load(
                self._geometry,
                host_slots=stored.slots[:pages],
                device_slots=self._rows(pages),
                page_keys=stored.page_keys[:pages],
            )
        )
        handle.wait()
        num_tokens = handle.verified_pages * self._geometry.page_size
        if num_tokens:
            _fill(cache, tensors, num_tokens)
        seconds = time.perf_counter() - started
        moved = Moved(handle.plan.num_bytes, seconds, handle.path)
        return RestoredPrefix(cache, num_tokens, pages, handle.bad_pages, moved)

    def drop(self, stored: StoredPrefix) -> None:
        """Give the slots of `stored` back; SlotOwnershipError if that was done before."""
        self._check_kept(stored)
        self._pool.free(stored.slots, SlotOwner.INDEX)
        self._kept.discard(stored)

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
        self.close()

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

    def _new_cache(self) -> Any:
        _, dynamic_cache, _ = _libraries()
        return dynamic_cache(config=self._config)

    def _tensors(self, cache: Any) -> tuple[list[tuple[Any, Any] | None], int]:
        shapes = _layer_shapes(cache)
        if shapes != self._shapes:
            different = [
                layer
                for layer, (one, other) in enumerate(zip(shapes, self._shapes, strict=False))
                if one != other
            ]
            raise ViewError(
                f"the cache has {len(shapes)} layers and the carrier was made for "
                f"{len(self._shapes)}; shapes or dtypes differ in layers {different}: make a "
                f"carrier for each model and dtype"
            )
        kept = [layer if shape else None for layer, shape in zip(cache.layers, shapes, strict=True)]
        tensors = [None if layer is None else (layer.keys, layer.values) for layer in kept]
        return tensors, min(layer.keys.shape[_TOKEN_DIM] for layer in kept if layer is not None)

    def _empty_tensors(self, num_tokens: int) -> list[tuple[Any, Any] | None]:
        torch, _, _ = _libraries()

        def empty(shape: tuple[int, int], dtype: torch.dtype) -> Any:
            return torch.empty((1, shape[0], num_tokens, shape[1]), dtype=dtype)

        return [
            None if s is None else (empty(s.key, s.key_dtype), empty(s.value, s.value_dtype))
            for s in self._shapes
        ]

    def _engine(self, tensors: Sequence[tuple[Any, Any] | None]) -> TransferEngine:
        planes: dict[str, list[Any]] = {plane.name: [] for plane in self._geometry.planes}
        for pair, names in zip(tensors, self._planes_of, strict=True):
            if pair is not None and names is not None:
                for name, tensor in zip(names, pair, strict=True):
                    planes[name].append(tensor)
        view = PoolView.from_tensors(self._geometry, planes, slot_dims=(_TOKEN_DIM,))
        return TransferEngine(view, self._pool)

    def _rows(self, pages: int) -> NDArray[np.int64]:
        return np.arange(pages * self._geometry.page_size, dtype=np.int64)

    def _page_keys(self, tokens: NDArray[np.int64]) -> list[bytes]:
        keys: list[bytes] = []
        before, size = self._namespace, self._geometry.page_size
        for start in range(0, len(tokens) - size + 1, size):
            page = tokens[start : start + size].astype("<i8").tobytes()
            before = hashlib.blake2b(before + page, digest_size=_KEY_BYTES).digest()
            keys.append(before)
        return keys


def cache_keyword(model: Any) -> str:
    """The name of the argument by which this model's `forward` and `generate` take a cache.

    It became ``cache`` in the course of transformers 5; before, it was ``past_key_values``.
    """
    parameters: Mapping[str, Any] = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _libraries() -> tuple[Any, Any, Any]:
    """torch, `DynamicCache` and the layer class that is served."""
    try:
        import torch
        from transformers.cache_utils import DynamicCache, DynamicLayer
    except ImportError as absent:
        raise MissingDependencyError(
            f"the transformers adapter needs torch and transformers 5.17 or newer ({absent}): "
            f"pip install 'kvferry[transformers]'"
        ) from absent
    return torch, DynamicCache, DynamicLayer


def _check_layers(cache: Any) -> Sequence[Any]:
    """The layers of `cache`, each of the one kind that is served."""
    _, _, dynamic_layer = _libraries()
    layers: Sequence[Any] = cache.layers
    for number, layer in enumerate(layers):
        # A subclass keeps something else than every token's key and value.
        if type(layer) is not dynamic_layer:
            raise GeometryError(
                f"layer {number} of the cache is a {type(layer).__name__}, and only "
                f"{dynamic_layer.__name__} (every token's key and value) is carried yet; use a "
                f"model without sliding windows, recurrent states and indexers"
            )
    return layers


def _layer_shapes(cache: Any) -> tuple[LayerShape | None, ...]:
    """The shape of each layer; None where a layer keeps nothing and reads another layer's."""
    shapes: list[LayerShape | None] = []
    for number, layer in enumerate(_check_layers(cache)):
        if not layer.get_seq_length():
            shapes.append(None)
            continue
        key, value = layer.keys, layer.values
        if key.shape[0] != 1 or value.shape[0] != 1:
            raise ViewError(
                f"layer {number} ({type(layer).__name__}) holds {key.shape[0]} sequences, and a "
                f"prefix is of one; split the batch first"
            )
        heads_and_dims = [(t.shape[1], t.shape[_TOKEN_DIM + 1]) for t in (key, value)]
        shapes.append(LayerShape(*heads_and_dims, key.dtype, value.dtype))
    if not any(shapes):
        raise ViewError(
            f"the cache is empty in all of its {len(shapes)} layers; pass one that the model has "
            f"filled with a token or more"
        )
    return tuple(shapes)


def _planes_of(shapes: Sequence[LayerShape | None]) -> list[tuple[str, str] | None]:
    """The names of the key and the value plane of each layer."""
    widths = list(dict.fromkeys(shape.element_sizes for shape in shapes if shape))
    number = {width: "" if len(widths) == 1 else str(n) for n, width in enumerate(widths)}
    return [
        (f"k{number[shape.element_sizes]}", f"v{number[shape.element_sizes]}") if shape else None
        for shape in shapes
    ]


def _planes(
    planes_of: Sequence[tuple[str, str] | None], shapes: Sequence[LayerShape | None]
) -> tuple[Plane, ...]:
    layers: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for layer, (names, shape) in enumerate(zip(planes_of, shapes, strict=True)):
        if names is not None and shape is not None:
            for name, size in zip(names, shape.element_sizes, strict=True):
                layers.setdefault(name, []).append(layer)
                sizes[name] = size
    return tuple(
        Plane(name=name, num_layers=len(ids), element_size=sizes[name], layer_ids=tuple(ids))
        for name, ids in layers.items()
    )


def _namespace(
    geometry: Geometry, model_id: str, shapes: Sequence[LayerShape | None]
) -> bytes:
    """What separates the keys of this model's pages from all others; the root of their chain."""
    told = (geometry.fingerprint, model_id, [shape and tuple(map(str, shape)) for shape in shapes])
    return hashlib.blake2b(repr(told).encode(), digest_size=_KEY_BYTES).digest()


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


def _fill(cache: Any, tensors: Sequence[tuple[Any, Any] | None], num_tokens: int) -> None:
    for layer, pair in zip(cache.layers, tensors, strict=True):
        if pair is not None:
            # `update` would copy both once more.
            layer.lazy_initialization(*pair)
            layer.keys, layer.values = (t[:, :, :num_tokens] for t in pair)

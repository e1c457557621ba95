"""The tensors of a transformers cache, layer by layer, as planes: rows of tokens, and states.

Letters: B sequences, H heads, T tokens, D numbers a head, W tokens of a window.

A layer that keeps every token has a row a token. A window keeps the last W - 1 tokens and a linear
attention layer keeps what it made of all of them: both exist only where the model stopped, so both
are states, one row a checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kvferry.errors import GeometryError, MissingDependencyError, ViewError
from kvferry.geometry import Geometry, HitRule, Plane, PoolView

if TYPE_CHECKING:
    import torch

__all__ = ["CacheParts", "Part", "new_cache"]

_TOKEN_DIM = 2
_KEY_VALUE = {"keys": "k", "values": "v"}


class Part(NamedTuple):
    """One tensor that one layer of a cache keeps."""

    layer: int
    name: str
    """Of its plane, but for a number."""

    field: str
    """The attribute of the layer."""

    number: int
    """Which of the layer's states; 0 where it has one, and for keys and values."""

    is_state: bool

    dims: tuple[int, ...]
    """(H, D) of a token; of a state the whole shape, without B."""

    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of a row."""
        return math.prod(self.dims) * self.dtype.itemsize

    @property
    def is_window(self) -> bool:
        """A state of dims (H, W - 1, D): the last tokens, at the end of that room."""
        return self.is_state and self.field in _KEY_VALUE


@dataclasses.dataclass(frozen=True)
class CacheParts:
    """All that a model's cache keeps."""

    parts: tuple[Part, ...]
    num_layers: int
    device: str

    @classmethod
    def of(cls, cache: Any) -> Self:
        """The parts of a `DynamicCache` that holds a token or more.

        Raises:
            MissingDependencyError: torch or transformers is not installed.
            GeometryError: A layer is of a kind that is not served.
            ViewError: The cache is empty, or lies on several devices.
        """
        found = [
            (part, tensor) for number, layer in enumerate(_checked_layers(cache))
            for part, tensor in _parts(number, layer)
        ]  # fmt: skip
        devices = sorted({str(tensor.device) for _, tensor in found})
        if not devices:
            raise ViewError(
                f"the cache is empty in all of its {len(cache.layers)} layers; pass one that the "
                f"model has filled with a token or more"
            )
        if len(devices) > 1:
            raise ViewError(
                f"the cache lies on {', '.join(devices)}, and one device is served; put the "
                f"model on one"
            )
        return cls(tuple(part for part, _ in found), len(cache.layers), devices[0])

    @property
    def has_states(self) -> bool:
        """Whether a prefix can only end where the model stopped."""
        return any(part.is_state for part in self.parts)

    @property
    def has_tokens(self) -> bool:
        """Whether some layer keeps a row for every token."""
        return any(not part.is_state for part in self.parts)

    def by_plane(self) -> dict[str, list[int]]:
        """The numbers of the parts in each plane; a plane has one size and one dtype."""
        groups: dict[str, dict[tuple[int, str], list[int]]] = {}
        for number, part in enumerate(self.parts):
            alike = groups.setdefault(part.name, {})
            alike.setdefault((part.num_bytes, str(part.dtype)), []).append(number)
        return {
            f"{name}{n if len(alike) > 1 else ''}": numbers
            for name, alike in groups.items()
            for n, numbers in enumerate(alike.values())
        }

    @property
    def planes(self) -> tuple[Plane, ...]:
        """``k``, ``v``, ``window_k``, ``window_v``, ``conv``, ``recurrent``; numbered as needed."""
        planes = []
        for name, numbers in self.by_plane().items():
            first = self.parts[numbers[0]]
            told: dict[str, Any] = {}
            if first.is_state:
                told = {"rows_per_page": 1, "hit_rule": HitRule.exact_boundary()}
            layer_ids = tuple(self.parts[number].layer for number in numbers)
            planes.append(
                Plane(
                    name=name,
                    num_layers=len(numbers),
                    element_size=first.num_bytes,
                    layer_ids=layer_ids,
                    **told,
                )
            )
        return tuple(planes)

    @property
    def dtypes(self) -> str:
        """The dtype of each plane, as text."""
        names = self.by_plane().items()
        return " ".join(f"{name}:{self.parts[numbers[0]].dtype}" for name, numbers in names)

    def empty_tensors(self, batch: int, num_tokens: int) -> list[torch.Tensor]:
        """A tensor for each part: ``[B, H, T, D]``, or ``[B, *dims]`` of a state; all zero."""
        import torch

        tensors = []
        for part in self.parts:
            dims = part.dims
            if not part.is_state:
                heads, width = dims
                dims = (heads, num_tokens, width)
            tensors.append(torch.zeros((batch, *dims), dtype=part.dtype, device=self.device))
        return tensors

    def pool_view(self, geometry: Geometry, tensors: Sequence[torch.Tensor]) -> PoolView:
        """Tensors of one sequence as a device pool: token slot t is token t, state row 0."""
        planes = self.by_plane()
        slot_dims = {
            name: (0,) if self.parts[numbers[0]].is_state else (_TOKEN_DIM,)
            for name, numbers in planes.items()
        }
        return PoolView.from_tensors(
            geometry,
            {name: [tensors[number] for number in numbers] for name, numbers in planes.items()},
            slot_dims=slot_dims,
        )

    def plane_slots(self) -> Mapping[str, list[int]]:
        """Where a pool keeps the state of each state plane."""
        planes = self.by_plane().items()
        return {name: [0] for name, numbers in planes if self.parts[numbers[0]].is_state}

    def check(self, cache: Any) -> None:
        """Raise ViewError unless `cache` keeps just these parts."""
        found = CacheParts.of(cache)
        if found != self:
            pairs = zip(found.parts, self.parts, strict=False)
            layers = sorted({part.layer for part, other in pairs if part != other})
            raise ViewError(
                f"the cache keeps {len(found.parts)} tensors in {found.num_layers} layers on "
                f"{found.device}, and {len(self.parts)} in {self.num_layers} on {self.device} were "
                f"expected; shapes or dtypes differ in layers {layers}: use one PrefixCache for "
                f"each model and dtype"
            )

    def read(self, cache: Any, row: int, tokens: slice, into: Sequence[torch.Tensor]) -> None:
        """Copy `tokens` of one sequence, and its states, to the front of tensors of one sequence.

        Args:
            cache: Only read.
            row: Which sequence.
            tokens: Of the cache's columns; where padding is, these begin behind it.
            into: As `empty_tensors` makes them.
        """
        for part, room in zip(self.parts, into, strict=True):
            tensor = _tensor(cache.layers[part.layer], part)[row].detach()
            if not part.is_state:
                room[0, :, : tokens.stop - tokens.start] = tensor[:, tokens]
            elif part.is_window:
                held = min(tensor.shape[1], part.dims[1])
                room.zero_()  # or what was there before would be stored with it
                room[0, :, part.dims[1] - held :] = tensor[:, tensor.shape[1] - held :]
            else:
                # One that records its past is longer; what counts is at its end.
                room[0] = tensor[..., tensor.shape[-1] - part.dims[-1] :]

    def fill(self, cache: Any, tensors: Sequence[torch.Tensor], num_tokens: int) -> None:
        """Make `tensors`, of T = `num_tokens`, the content of an empty `cache`, uncopied."""
        for part, tensor in zip(self.parts, tensors, strict=True):
            layer = cache.layers[part.layer]
            if not part.is_state:
                _set(layer, part.field, tensor)
            elif part.is_window:
                held = min(num_tokens, part.dims[1])
                _set(layer, part.field, tensor[:, :, part.dims[1] - held :].contiguous())
                layer.cumulative_length = num_tokens
            elif part.field == "conv_states":
                layer.lazy_initialization(conv_states=tensor, state_idx=part.number)
                layer.conv_states[part.number].copy_(tensor)
                layer.has_previous_state[part.number] = True
            else:
                layer.lazy_initialization(recurrent_states=tensor, state_idx=part.number)
                layer.recurrent_states[part.number].copy_(tensor)


def new_cache(config: Any) -> Any:
    """An empty `DynamicCache` for the model of `config`."""
    return _classes().DynamicCache(config=config)


def _set(layer: Any, field: str, tensor: torch.Tensor) -> None:
    # The layer's own `update` would copy it once more. Keys and values are both set here, one by
    # one, and the first of them makes the layer ready for both.
    if not layer.is_initialized:
        layer.lazy_initialization(tensor, tensor)
    setattr(layer, field, tensor)


def _tensor(layer: Any, part: Part) -> Any:
    tensor = getattr(layer, part.field)
    return tensor[part.number] if isinstance(tensor, dict) else tensor


def _classes() -> Any:
    try:
        import torch  # noqa: F401  (transformers imports without it, and lacks its classes then)
        from transformers import cache_utils
        from transformers.cache_utils import DynamicCache  # noqa: F401
    except ImportError as absent:
        raise MissingDependencyError(
            f"the transformers adapter needs torch and transformers ({absent}): "
            f"pip install 'kvferry[transformers]'"
        ) from absent
    return cache_utils


def _checked_layers(cache: Any) -> Sequence[Any]:
    classes = _classes()
    if type(cache) is not classes.DynamicCache:
        raise GeometryError(
            f"a cache must be a DynamicCache, not {type(cache).__name__}; static, quantised and "
            f"encoder-decoder caches are not served"
        )
    if cache.offloading:
        raise GeometryError(
            "the cache offloads its layers by itself, and is not served; make it without offloading"
        )
    served = (
        classes.DynamicLayer,
        classes.DynamicSlidingWindowLayer,
        classes.LinearAttentionLayer,
        classes.LinearAttentionAndFullAttentionLayer,
    )
    layers: Sequence[Any] = cache.layers
    for number, layer in enumerate(layers):
        # A subclass keeps something else than its base.
        if type(layer) not in served and type(layer).__name__ != "DummyLayer":
            raise GeometryError(
                f"layer {number} of the cache is a {type(layer).__name__}, and only "
                f"{', '.join(kind.__name__ for kind in served)} are served; use a model whose "
                f"layers are of these kinds"
            )
    return layers


def _parts(number: int, layer: Any) -> list[tuple[Part, Any]]:
    parts: list[tuple[Part, Any]] = []
    # A layer that reads another's keys keeps none of its own.
    if getattr(layer, "keys", None) is not None and layer.keys.numel():
        window = getattr(layer, "sliding_window", None)
        for field, name in _KEY_VALUE.items():
            tensor = getattr(layer, field)
            _, heads, _, width = tensor.shape
            dims = (heads, width) if window is None else (heads, window - 1, width)
            full = f"window_{name}" if window else name
            part = Part(number, full, field, 0, window is not None, dims, tensor.dtype)
            parts.append((part, tensor))
    for field, name in (("conv_states", "conv"), ("recurrent_states", "recurrent")):
        for index, tensor in getattr(layer, field, {}).items():
            if tensor is not None:
                full = f"{name}_{index}" if index else name
                dims = tuple(tensor.shape[1:])
                if field == "conv_states":  # one that records its past is longer
                    dims = (*dims[:-1], layer.conv_kernel_size[index])
                parts.append((Part(number, full, field, index, True, dims, tensor.dtype), tensor))
    return parts

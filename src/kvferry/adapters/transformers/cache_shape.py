"""What a transformers cache is made of. All that differs between its versions is in this module.

Letters: H heads, T tokens, D numbers a head.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kvferry.errors import GeometryError, MissingDependencyError, ViewError
from kvferry.geometry import Geometry, Plane, PoolView

if TYPE_CHECKING:
    import torch

    LayerTensors = tuple[torch.Tensor, torch.Tensor]

__all__ = ["CacheShape", "LayerShape", "cache_keyword", "empty_cache", "fill_cache"]

_TOKEN_DIM = 2
# As in the extra of this name.
_PACKAGES = ("torch>=2.11", "transformers>=5.17")


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


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """What a model's cache keeps of a token, layer by layer."""

    layers: tuple[LayerShape | None, ...]
    """None: the layer keeps nothing of its own (it reads another layer's)."""

    @classmethod
    def of(cls, cache: Any) -> Self:
        """The shape of a `DynamicCache` that holds a token or more.

        Raises:
            MissingDependencyError: torch or transformers is not installed.
            GeometryError: A layer is of a kind that is not served.
            ViewError: The cache is empty, or holds more than one sequence.
        """
        layers = _checked_layers(cache)
        found = cls(tuple(_layer_shape(number, layer) for number, layer in enumerate(layers)))
        if not any(found.layers):
            raise ViewError(
                f"the cache is empty in all of its {len(layers)} layers; pass one that the model "
                f"has filled with a token or more"
            )
        return found

    @property
    def planes(self) -> tuple[Plane, ...]:
        """``k`` and ``v``; ``k0``, ``v0``, ``k1``… where layers differ in element size."""
        layer_ids: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for layer, (names, shape) in enumerate(zip(self._plane_names, self.layers, strict=True)):
            if names and shape:
                for name, size in zip(names, shape.element_sizes, strict=True):
                    layer_ids.setdefault(name, []).append(layer)
                    sizes[name] = size
        return tuple(
            Plane(name=name, num_layers=len(ids), element_size=sizes[name], layer_ids=tuple(ids))
            for name, ids in layer_ids.items()
        )

    @property
    def _plane_names(self) -> list[tuple[str, str] | None]:
        sizes = list(dict.fromkeys(shape.element_sizes for shape in self.layers if shape))
        number = {size: str(n) if len(sizes) > 1 else "" for n, size in enumerate(sizes)}
        numbers = [number[shape.element_sizes] if shape else None for shape in self.layers]
        return [None if n is None else (f"k{n}", f"v{n}") for n in numbers]

    def tensors(self, cache: Any) -> list[LayerTensors | None]:
        """The keys and values of each layer, ``[1, H, T, D]``; ViewError if shaped otherwise."""
        found = CacheShape.of(cache)
        if found != self:
            pairs = zip(found.layers, self.layers, strict=False)
            differing = [str(layer) for layer, (one, other) in enumerate(pairs) if one != other]
            raise ViewError(
                f"the cache has {len(found.layers)} layers, {len(self.layers)} were expected; "
                f"heads, widths or dtypes differ in layers {', '.join(differing) or 'none'}: use "
                f"one carrier for each model and dtype"
            )
        return [
            (layer.keys, layer.values) if shape else None
            for layer, shape in zip(cache.layers, self.layers, strict=True)
        ]

    def empty_tensors(self, num_tokens: int) -> list[LayerTensors | None]:
        """New tensors as `tensors` gives them, T = `num_tokens`; what they hold is undefined."""
        import torch

        def empty(of: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((1, of[0], num_tokens, of[1]), dtype=dtype)

        return [
            (empty(shape.key, shape.key_dtype), empty(shape.value, shape.value_dtype))
            if shape
            else None
            for shape in self.layers
        ]

    def pool_view(self, geometry: Geometry, tensors: Sequence[LayerTensors | None]) -> PoolView:
        """`tensors` as a device pool: token slot t is token t."""
        planes: dict[str, list[Any]] = {plane.name: [] for plane in geometry.planes}
        for names, pair in zip(self._plane_names, tensors, strict=True):
            if names and pair:
                for name, tensor in zip(names, pair, strict=True):
                    planes[name].append(tensor)
        return PoolView.from_tensors(geometry, planes, slot_dims=(_TOKEN_DIM,))


def empty_cache(config: Any, num_layers: int) -> Any:
    """A new `DynamicCache` for the model of `config`.

    Raises GeometryError if one of its layers is of a kind that is not served, or their number is
    not `num_layers`.
    """
    dynamic_cache, _ = _libraries()
    cache = dynamic_cache(config=config)
    layers = _checked_layers(cache)
    if len(layers) != num_layers:
        raise GeometryError(
            f"the cache has {num_layers} layers, but this config makes {len(layers)}; pass a "
            f"cache and the config of one model"
        )
    return cache


def fill_cache(cache: Any, tensors: Sequence[LayerTensors | None], num_tokens: int) -> None:
    """Make the first `num_tokens` tokens of `tensors` the content of an empty `cache`, uncopied."""
    for layer, pair in zip(cache.layers, tensors, strict=True):
        if pair:
            # Its `update` would copy both once more.
            layer.lazy_initialization(*pair)
            layer.keys, layer.values = (tensor[:, :, :num_tokens] for tensor in pair)


def cache_keyword(model: Any) -> str:
    """The name of the argument by which this model's `forward` and `generate` take a cache.

    It is ``cache`` in transformers 5.24, and was ``past_key_values`` in 5.17.
    """
    parameters: Mapping[str, Any] = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _libraries() -> tuple[Any, Any]:
    """`DynamicCache`, and the one class of layers that is served."""
    try:
        import torch  # noqa: F401  (transformers imports without it, and lacks its classes then)
        from transformers.cache_utils import DynamicCache, DynamicLayer
    except ImportError as absent:
        raise MissingDependencyError(
            f"the transformers adapter needs torch and transformers ({absent}): "
            f"pip install {' '.join(map(repr, _PACKAGES))}"
        ) from absent
    return DynamicCache, DynamicLayer


def _checked_layers(cache: Any) -> Sequence[Any]:
    dynamic_cache, dynamic_layer = _libraries()
    if not isinstance(cache, dynamic_cache):
        raise GeometryError(
            f"a cache must be a {dynamic_cache.__name__}, not {type(cache).__name__}; the model "
            f"makes one if none is passed"
        )
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


def _layer_shape(number: int, layer: Any) -> LayerShape | None:
    if not layer.get_seq_length():
        return None
    for tensor in (layer.keys, layer.values):
        if tensor.shape[0] != 1:
            raise ViewError(
                f"layer {number} ({type(layer).__name__}) holds a batch of {tensor.shape[0]}, and "
                f"a prefix is one sequence; store the sequences one by one"
            )
    key, value = layer.keys, layer.values
    return LayerShape(_heads_and_dim(key), _heads_and_dim(value), key.dtype, value.dtype)


def _heads_and_dim(tensor: Any) -> tuple[int, int]:
    _, heads, _, dim = tensor.shape
    return heads, dim

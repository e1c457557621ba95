"""vLLM's KV tensors as planes: one row is one block of one layer, whatever is inside of it.

How an attention kernel arranges the tokens of a block is its own business, and differs between
kernels and instruction sets. So a block is carried whole, and what tells how to read it goes into
the namespace.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from kvferry.errors import ConfigError
from kvferry.geometry import Geometry, Plane, PoolView

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["BlockGroup", "EnginePools", "page_size_of"]


@dataclasses.dataclass(frozen=True)
class BlockGroup:
    """Layers that go by one block table."""

    index: int
    layer_names: tuple[str, ...]
    block_size: int
    """Tokens a block."""


def page_size_of(groups: Sequence[BlockGroup]) -> int:
    """Tokens a page: the least that is whole blocks of every group."""
    return math.lcm(*(group.block_size for group in groups))


class EnginePools:
    """Planes, views and names of the layers of one worker's tensors.

    Args:
        groups: All that are carried.
        kv_caches: By layer name: a tensor whose first dimension counts blocks, or the smaller
            blocks of an attention kernel, evenly.
        num_blocks: How many blocks each layer has.
        origin: What else tells how the bytes are to be read.

    Raises:
        ConfigError: A layer's cache is no tensor, or not made of blocks.
        ViewError: A tensor that cannot be described by strides.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        kv_caches: Mapping[str, Any],
        num_blocks: int,
        *,
        origin: Sequence[str] = (),
    ) -> None:
        page_size = page_size_of(groups)
        numbers = [name for group in groups for name in group.layer_names]
        self.layer_of = {name: number for number, name in enumerate(numbers)}
        """The number of each layer, by the engine's name."""

        planes: list[Plane] = []
        tensors: dict[str, list[Any]] = {}
        self.groups_of_plane: dict[str, int] = {}
        """Which block table a plane goes by."""

        told: list[str] = list(origin)
        for group in groups:
            by_size: dict[int, list[tuple[int, Any]]] = {}
            for name in group.layer_names:
                blocks = _by_block(name, kv_caches.get(name), num_blocks)
                size = blocks[0].numel() * blocks.element_size()
                by_size.setdefault(size, []).append((self.layer_of[name], blocks))
                told.append(f"{blocks.dtype} {list(blocks.shape[1:])} {_order(blocks)}")
            for number, (size, layers) in enumerate(sorted(by_size.items())):
                plane = Plane(
                    name=f"group{group.index}_{number}",
                    num_layers=len(layers),
                    element_size=size,
                    rows_per_page=page_size // group.block_size,
                    layer_ids=tuple(layer for layer, _ in layers),
                )
                planes.append(plane)
                tensors[plane.name] = [blocks for _, blocks in layers]
                self.groups_of_plane[plane.name] = group.index
        self.geometry = Geometry(planes=tuple(planes), page_size=page_size)
        self.view = PoolView.from_tensors(self.geometry, tensors)
        self.layout = json.dumps([list(dict.fromkeys(told)), len(numbers)])
        """Two layouts that differ must not share pages."""


def _order(blocks: Any) -> list[int]:
    """The dimensions of a block, slowest first: strides themselves tell of the pool's size."""
    strides = blocks.stride()[1:]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _by_block(name: str, cache: Any, num_blocks: int) -> Any:
    if not hasattr(cache, "unflatten"):
        raise ConfigError(
            f"layer {name!r} keeps {type(cache).__name__} where one tensor is expected: states of "
            f"linear-attention layers are not carried by this connector"
        )
    if not cache.dim() or cache.shape[0] % num_blocks or not cache.shape[0]:
        raise ConfigError(
            f"layer {name!r} has a cache of shape {tuple(cache.shape)}, whose first dimension does "
            f"not count {num_blocks} blocks: use a layout with the blocks of a layer outermost"
        )
    if cache.shape[0] == num_blocks:
        return cache
    return cache.unflatten(0, (num_blocks, -1))

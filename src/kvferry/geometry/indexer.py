"""Sparse attention: which layers choose their tokens with an indexer, and which keep its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.errors import GeometryError, UnknownArchitectureError
from kvferry.geometry.hf_fields import BY_HAND, Fields, missing
from kvferry.geometry.layer_kinds import INDEXED_NAMES, LayerKind

__all__ = ["IndexerLayers", "indexer_layers"]


class IndexerLayers(NamedTuple):
    """Layers by their number in the model; draft layers count on after the last one."""

    sparse: frozenset[int]
    """Those that attend to what an indexer has chosen, their own or an earlier layer's."""

    keyed: frozenset[int]
    """Those that keep an indexer key a token."""


def indexer_layers(fields: Fields, kinds: Sequence[LayerKind], num_layers: int) -> IndexerLayers:
    """Which layers have an indexer: those that the config names as such, else all FULL ones.

    A draft layer runs its own indexer, whatever the layers before it share. Raises
    UnknownArchitectureError where a layer is named as indexed and no field tells how wide the keys
    are, GeometryError where fields tell of other layers than there are.
    """
    named = _named_as_indexed(fields, num_layers)
    width = fields.first("index_head_dim", "indexer_head_dim")
    if not fields.flag("use_dsa", True):
        return IndexerLayers(frozenset(), frozenset())
    if width is None:
        if named:
            raise missing(
                f"index_head_dim or indexer_head_dim (needed because layer {min(named)} is indexed)"
            )
        return IndexerLayers(frozenset(), frozenset())
    with_latents = fields.has("kv_lora_rank")
    if with_latents != (width == "index_head_dim") or (
        fields.has("index_head_dim") and fields.has("indexer_head_dim")
    ):
        raise UnknownArchitectureError(
            f"this config has {width} {'beside' if with_latents else 'without'} kv_lora_rank; the "
            f"indexers that are known go by index_head_dim with latents, and by indexer_head_dim "
            f"alone without. Please {BY_HAND}"
        )
    full = frozenset(layer for layer, kind in enumerate(kinds) if kind is LayerKind.FULL)
    sparse = full & named if named else full
    own = _own_indexer(fields, num_layers, len(kinds)) | frozenset(range(num_layers, len(kinds)))
    return IndexerLayers(sparse, sparse & own)


def _named_as_indexed(fields: Fields, num_layers: int) -> frozenset[int]:
    named: set[int] = set()
    for field, first in (("layer_types", 0), ("mtp_layer_types", num_layers)):
        if fields.has(field):
            kinds = enumerate(fields.sequence(field), first)
            named |= {layer for layer, kind in kinds if kind in INDEXED_NAMES}
    return frozenset(named)


def _own_indexer(fields: Fields, num_layers: int, num_all: int) -> frozenset[int]:
    """The layers that keep an indexer key of their own; the others reuse an earlier layer's pick.

    Told by `indexer_types` ("full" or "shared" a layer), by `index_topk_pattern` ("F" or "S" a
    layer), or by `index_topk_freq` with `index_skip_topk_offset`; otherwise every layer keeps one.
    """
    name = fields.first("indexer_types", "index_topk_pattern")
    if name is None:
        if not fields.has("index_topk_freq"):
            fields.assume("every layer keeps an indexer key of its own: no index_topk_freq is told")
        every = fields.integer("index_topk_freq", 1)
        offset = fields.integer("index_skip_topk_offset", 2, low=0)
        return frozenset(i for i in range(num_layers) if max(i - offset + 1, 0) % every == 0)
    value = fields.get(name)
    told = list(value) if isinstance(value, str) else fields.sequence(name)
    bad = sorted({repr(one) for one in told if one not in ("full", "shared", "F", "S")})
    if bad or not num_layers <= len(told) <= num_all:
        raise GeometryError(
            f"config field {name} must say full or shared (F or S) for each of {num_layers} "
            f"layers; it has {len(told)} entries{' and ' + ', '.join(bad) if bad else ''}"
        )
    return frozenset(i for i in range(num_layers) if told[i] in ("full", "F"))

"""The geometry of a model on one rank, from its Hugging Face config.

The rules go by the fields a config has. The name of a model decides a few defaults that published
configs leave out, and whether a field that no rule reads is a reason to refuse (`model_types`). The
planes they give:

    k, v                        layers that keep every token
    k_window, v_window          layers that keep a sliding window or an attention chunk
    latent, index_key           multi-head latent attention; the key of its sparse indexer
    conv_state, recurrent_state linear attention: one row a checkpoint
    <plane>_scale               block scales of nvfp4 and mxfp8, beside the plane they belong to
    draft_<plane>               draft layers, with draft_layers="planes"

Layers of one kind that differ in width or window get planes of their own (``k``, ``k_2``, …), in
the order of their first layer. `Plane.layer_ids` are layers of the whole model, also on a pipeline
stage; draft layers count on after the last one. A window is told in tokens, the token that attends
included, so `HitRule.last` never asks for too few. An encoder, which keeps no cache, is refused
where a field tells it from a decoder; where none does, it is read as if it were one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvferry.errors import GeometryError
from kvferry.geometry.hf_fields import (
    BY_OVERRIDE,
    Fields,
    load_config,
    missing,
    other_names,
    refuse_unread,
    text_fields,
)
from kvferry.geometry.indexer import indexer_layers
from kvferry.geometry.kv_dtype import kv_format
from kvferry.geometry.layer_cells import (
    FIELDS_OF_KIND,
    Cell,
    Rank,
    cache_format,
    index_cell,
    layer_cells,
    refuse_uneven_heads,
    without_latents_if_told,
)
from kvferry.geometry.layer_kinds import (
    LayerKind,
    draft_count,
    layer_kinds,
    refuse_unknown,
)
from kvferry.geometry.model_types import refuse_suspicious
from kvferry.geometry.no_cache import refuse_encoder
from kvferry.geometry.per_layer import per_layer_fields, refuse_unread_lists
from kvferry.geometry.sharding import replicated, split_layers, stage_layers
from kvferry.geometry.spec import DEFAULT_PAGE_SIZE, Geometry, HitRule, Plane

__all__ = ["DRAFT_LAYERS", "ConfigReading", "geometry_from_hf_config", "read_hf_config"]

DRAFT_LAYERS: tuple[str, ...] = ("none", "layers", "planes")
"""What ``draft_layers=`` takes."""

_MAX_LAYERS = 1 << 14
_MOST_SHOWN_STAGES = 8

_PLANE_ORDER = ("k", "v", "k_window", "v_window", "latent", "latent_window", "index_key")
_STATE_ORDER = ("conv_state", "recurrent_state")


class ConfigReading(NamedTuple):
    """What a config says, and what it does not."""

    geometry: Geometry
    assumed: tuple[str, ...]
    """What the config does not tell and was taken for granted, in sentences without a full stop."""


def geometry_from_hf_config(config: Any, **options: Any) -> Geometry:
    """The geometry alone; arguments and errors as for `read_hf_config`."""
    return read_hf_config(config, **options).geometry


def read_hf_config(
    config: Mapping[str, Any] | str | os.PathLike[str] | Any,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    pp: int | None = None,
    pp_rank: int = 0,
    pp_layers: Sequence[int] | None = None,
    kv_dtype: str | None = None,
    page_size: int = DEFAULT_PAGE_SIZE,
    draft_layers: str = "none",
    overrides: Mapping[str, Any] | None = None,
) -> ConfigReading:
    """The planes that one rank of a model caches.

    Args:
        config: the fields as a mapping, the path of a ``config.json`` or of its folder, or an
            object with ``to_dict()``. The language model's part of it is found by itself.
        tp: tensor-parallel ranks. KV heads are shared out, or replicated where there are fewer
            heads than ranks; latents and indexer keys are whole on every rank.
        tp_rank: this rank. Equal heads make every rank's geometry equal.
        pp: pipeline stages; None: 1, or as many as `pp_layers` has. Layers are split contiguously,
            and the first ``num_layers % pp`` stages get one more.
        pp_rank: this stage. Draft layers belong to the last.
        pp_layers: how many layers each stage has, where the engine splits otherwise.
        kv_dtype: None or ``auto`` for what `quantization_config` says of the cache, or else the
            model's own dtype (bf16 if the config tells none); or a name from
            `kvferry.geometry.kv_dtype.KV_DTYPES`. With sparse-attention latents ``fp8_e4m3`` means
            rows with their own scales (512 + 16 + 128 = 656 bytes), ``fp8_per_tensor`` rows without
            (576). ``fp8_ds_mla`` means the former in any latent row, and nothing else. Indexer keys
            are fp8 with a scale beside latents, in the model's dtype without; states keep the
            model's dtype, whatever this says.
        page_size: tokens a page.
        draft_layers: ``none``, ``layers`` (further layers of the same planes) or ``planes``
            (planes of their own, named ``draft_…``).
        overrides: config fields to put in place of the config's own, of the language model's part;
            None takes a field away. Each must be one that the rules read.

    Raises GeometryError for a value that cannot be, naming its field, and for an override that
    changes nothing; UnknownArchitectureError when the config does not tell enough, naming what is
    missing, or when an unknown model type tells of more than plain attention, naming the field.
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise GeometryError(
            f"overrides must be a mapping of config fields, not {type(overrides).__name__}"
        )
    if draft_layers not in DRAFT_LAYERS:
        raise GeometryError(f"draft_layers {draft_layers!r} is none of: {', '.join(DRAFT_LAYERS)}")
    fields = text_fields(load_config(config), overrides or {})
    fields = without_latents_if_told(fields)
    refuse_unknown(fields)
    refuse_encoder(fields)
    absent = [n for n in ("num_hidden_layers", "num_attention_heads") if not fields.has(n)]
    if absent:
        raise missing(*absent, hint=other_names(fields))
    num_layers = fields.integer("num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise GeometryError(f"num_hidden_layers {num_layers} is more than {_MAX_LAYERS}")
    replicated(tp=tp, tp_rank=tp_rank)
    split = split_layers(num_layers, pp=pp, pp_layers=pp_layers)
    stage = stage_layers(split, pp_rank)
    if pp_layers is None and len(split) > 1:
        fields.assume(
            f"pipeline stages have {_counts(split)} layers: engines differ in this, and pp_layers "
            f"gives another split"
        )
    num_draft = draft_count(fields)
    if draft_layers != "none" and not num_draft:
        raise GeometryError(
            f"draft_layers={draft_layers!r}, but this config has no draft layers; "
            f"add num_nextn_predict_layers {BY_OVERRIDE}, or ask for draft_layers='none'"
        )
    if num_draft > _MAX_LAYERS:
        raise GeometryError(f"{num_draft} draft layers are more than {_MAX_LAYERS}")

    is_auto = kv_dtype is None or kv_dtype == "auto"
    rank = Rank(tp, tp_rank, cache_format(fields) if is_auto else kv_format(kv_dtype))
    kinds = layer_kinds(fields, num_layers, num_draft)
    planes = _Planes()
    for layer, cell in _cells(fields, kinds, num_layers, rank):
        is_draft = layer >= num_layers
        if is_draft and draft_layers == "none":
            continue
        owned = stage.is_last if is_draft else stage.first <= layer < stage.stop
        planes.add(layer, cell, owned, "draft_" if is_draft and draft_layers == "planes" else "")
    if num_draft and draft_layers == "none":
        fields.assume(
            f"{num_draft} draft layer{'s' * (num_draft != 1)} of the model "
            f"{'are' if num_draft != 1 else 'is'} left out: draft_layers brings them in"
        )
    found = planes.build()
    if not found:
        raise GeometryError(
            f"pipeline stage {pp_rank} of {len(split)} has layers {stage.first} to "
            f"{stage.stop - 1}, none of which keeps a cache; choose a smaller pp, or other "
            f"pp_layers"
        )
    refuse_uneven_heads(fields, tp)
    whole = [plane.name for plane in found if "latent" in plane.name or "index_key" in plane.name]
    if tp > 1 and whole:
        fields.assume(
            f"all {tp} tp ranks keep the same bytes of {', '.join(whole)}: tp does not split them"
        )
    put = {name: value for name, value in (overrides or {}).items() if value is not None}
    refuse_unread(fields, put)
    refuse_suspicious(fields)
    refuse_unread_lists(fields, num_layers)
    refuse_unread(fields, overrides or {})
    return ConfigReading(Geometry(planes=found, page_size=page_size), fields.assumed)


def _counts(split: Sequence[int]) -> str:
    """Such as ``16, 15, 15``; many equal ones as a count."""
    if len(split) <= _MOST_SHOWN_STAGES:
        return ", ".join(map(str, split))
    longer = sum(count > split[-1] for count in split)
    told = f"{split[-1]} (x {len(split) - longer})"
    return f"{split[0]} (x {longer}), then {told}" if longer else told


class _Planes:
    """Collects cells into planes, in a fixed order, with names that no stage or rank changes."""

    def __init__(self) -> None:
        self._layers: dict[tuple[str, tuple[int, ...], HitRule], list[int]] = {}
        self._first: dict[tuple[str, tuple[int, ...], HitRule], Cell] = {}

    def add(self, layer: int, cell: Cell, owned: bool, prefix: str) -> None:
        key = (prefix + cell.name, cell.widths, cell.hit_rule)
        self._first.setdefault(key, cell)
        layers = self._layers.setdefault(key, [])
        if owned:
            layers.append(layer)

    def build(self) -> tuple[Plane, ...]:
        seen: dict[str, int] = {}
        built: list[tuple[tuple[bool, int, int], Plane]] = []
        for key, layers in self._layers.items():
            name, cell = key[0], self._first[key]
            seen[name] = number = seen.get(name, 0) + 1
            if not layers:
                continue
            plane = Plane(
                name=name if number == 1 else f"{name}_{number}",
                num_layers=len(layers),
                element_size=cell.element_size,
                rows_per_page=cell.rows_per_page,
                hit_rule=cell.hit_rule,
                layer_ids=tuple(layers),
            )
            place = _ordered_names().index(cell.name)
            built.append(((name != cell.name, place, number), plane))
        return tuple(plane for _, plane in sorted(built, key=lambda one: one[0]))


def _ordered_names() -> Sequence[str]:
    with_scales = [each for name in _PLANE_ORDER for each in (name, f"{name}_scale")]
    return (*with_scales, *_STATE_ORDER)


def _cells(
    fields: Fields, kinds: Sequence[LayerKind], num_layers: int, rank: Rank
) -> Iterator[tuple[int, Cell]]:
    if fields.get("per_layer_config"):
        # Such a config tells the widths of odd layers there, and nowhere else.
        fields = fields.over(dict.fromkeys(FIELDS_OF_KIND))
    per_layer = per_layer_fields(fields, num_layers, len(kinds))
    indexer = indexer_layers(fields, kinds, num_layers)
    for layer, kind in enumerate(kinds):
        here = per_layer.get(layer, fields)
        if kind is LayerKind.SHARED:
            continue
        cells = layer_cells(here, kind, rank, is_sparse=layer in indexer.sparse)
        if layer in indexer.keyed:
            cells.append(index_cell(here))
        for cell in cells:
            yield layer, cell

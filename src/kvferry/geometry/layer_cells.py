"""What one layer of a model adds to its planes, in bytes of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvferry.errors import GeometryError
from kvferry.geometry.hf_fields import BY_HAND, Fields, check_integer, missing
from kvferry.geometry.kv_dtype import KVFormat, kv_format
from kvferry.geometry.layer_kinds import LayerKind
from kvferry.geometry.sharding import shard_heads
from kvferry.geometry.spec import HitRule

__all__ = ["FIELDS_OF_KIND", "Cell", "Rank", "index_cell", "layer_cells", "model_format"]

# A scale of a latent row or of an indexer key is one fp32 for this many fp8 values.
_ROW_SCALE_BLOCK = 128
_ROW_SCALE_BYTES = 4
_ROPE_BYTES = 2

_ALL_PAGES = HitRule()

# (heads, key width, value width) of layers that do not use the plain fields.
_WIDTHS_OF_KIND = {
    LayerKind.FULL: ("num_global_key_value_heads", "global_head_dim", ""),
    LayerKind.WINDOW: ("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
}


FIELDS_OF_KIND: tuple[str, ...] = tuple(
    name for names in _WIDTHS_OF_KIND.values() for name in names if name
)
"""Every field that gives layers of one kind widths of their own."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one layer adds to one plane. Layers with equal `widths` and rule share the plane."""

    name: str
    element_size: int
    widths: tuple[int, ...]
    """Of the whole model, so that planes are told apart alike on every rank."""

    hit_rule: HitRule = _ALL_PAGES
    rows_per_page: int | None = None


@dataclasses.dataclass(frozen=True)
class Rank:
    """Who keeps the cells, and in which format."""

    tp: int
    tp_rank: int
    format: KVFormat


def layer_cells(fields: Fields, kind: LayerKind, rank: Rank) -> list[Cell]:
    """What a layer of `kind` (any but SHARED) with `fields` keeps, its indexer key not counted."""
    if kind is LayerKind.LINEAR:
        return _state_cells(fields, rank)
    if fields.has("kv_lora_rank"):
        return _latent_cells(fields, kind, rank)
    return _head_cells(fields, kind, rank)


def _head_cells(fields: Fields, kind: LayerKind, rank: Rank) -> list[Cell]:
    suffix, rule = _kind_suffix(fields, kind)
    heads, k_width, v_width = _head_widths(fields, kind)
    mine = shard_heads(heads, tp=rank.tp, tp_rank=rank.tp_rank).num_heads
    cells: list[Cell] = []
    for name, width in ((f"k{suffix}", k_width), (f"v{suffix}", v_width)):
        cells += _valued_cells(name, mine, width, (heads, width), rule, rank.format)
    return cells


def _head_widths(fields: Fields, kind: LayerKind) -> tuple[int, int, int]:
    heads_name, k_name, v_name = _WIDTHS_OF_KIND[kind]
    if kind is LayerKind.FULL and not fields.flag("attention_k_eq_v", True):
        heads_name = ""  # the other head count goes with keys that serve as values
    all_heads = fields.integer("num_attention_heads")
    heads = fields.integer("num_key_value_heads", all_heads)
    heads = fields.integer(heads_name, heads)
    if fields.has(k_name):
        k_width = fields.integer(k_name)
        return heads, k_width, fields.integer(v_name, k_width)
    if not fields.has("head_dim"):
        if not fields.has("hidden_size"):
            raise missing("head_dim (or hidden_size)")
        hidden = fields.integer("hidden_size")
        if hidden % all_heads:
            raise GeometryError(
                f"hidden_size {hidden} is no multiple of num_attention_heads {all_heads}, and the "
                f"config has no head_dim; add head_dim with overrides="
            )
        k_width = hidden // all_heads
    else:
        k_width = fields.integer("head_dim")
    return heads, k_width, fields.integer("v_head_dim", k_width)


def _latent_cells(fields: Fields, kind: LayerKind, rank: Rank) -> list[Cell]:
    if not fields.has("qk_rope_head_dim"):
        raise missing("qk_rope_head_dim (needed because kv_lora_rank is set)")
    suffix, rule = _kind_suffix(fields, kind)
    name = f"latent{suffix}"
    width, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim", low=0)
    if not fields.has("index_head_dim"):
        return _valued_cells(name, 1, width + rope, (width, rope), rule, rank.format)
    kept = rank.format
    if kept.scale_block or kept.name == "fp8_e5m2":
        raise GeometryError(
            f"kv_dtype {kept.name}: the latent rows of sparse attention are known in bf16, fp16, "
            f"fp32, fp8_e4m3 and fp8_per_tensor; choose one of these, or {BY_HAND}"
        )
    if kept.keeps_row_scales:
        size = width + _row_scales("kv_lora_rank", width) + rope * _ROPE_BYTES
    else:
        size = kept.payload_bytes(width + rope, name)
    return [Cell(name, size, (width, rope), rule)]


def index_cell(fields: Fields) -> Cell:
    """The key that the indexer of a sparse-attention layer keeps: fp8 with fp32 scales."""
    width = fields.integer("index_head_dim")
    return Cell("index_key", width + _row_scales("index_head_dim", width), (width,))


def _row_scales(name: str, width: int) -> int:
    blocks, left = divmod(width, _ROW_SCALE_BLOCK)
    if left:
        raise GeometryError(
            f"config field {name} {width} is no multiple of {_ROW_SCALE_BLOCK}, the values that "
            f"share an fp8 scale; {BY_HAND}"
        )
    return blocks * _ROW_SCALE_BYTES


def _valued_cells(
    name: str,
    heads: int,
    width: int,
    widths: tuple[int, ...],
    rule: HitRule,
    kept: KVFormat,
) -> list[Cell]:
    cells = [Cell(name, kept.payload_bytes(heads * width, name), widths, rule)]
    if kept.scale_block:
        size = kept.scale_bytes(heads, width, name)
        cells.append(Cell(f"{name}_scale", size, widths, rule))
    return cells


def _kind_suffix(fields: Fields, kind: LayerKind) -> tuple[str, HitRule]:
    if kind is LayerKind.FULL:
        return "", _ALL_PAGES
    name = fields.first("sliding_window", "sliding_window_size", "attention_chunk_size")
    if name is None:
        raise missing("sliding_window (needed because layers have a window)")
    return "_window", HitRule.last(fields.integer(name))


def _state_cells(fields: Fields, rank: Rank) -> list[Cell]:
    shape = _state_shape(fields)
    k_heads, k_width, v_heads, v_width, kernel = shape
    mine = [
        shard_heads(
            heads, tp=rank.tp, tp_rank=rank.tp_rank, what=f"linear {what}", may_replicate=False
        ).num_heads
        for what, heads in (("key heads", k_heads), ("value heads", v_heads))
    ]
    name = fields.first("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    recurrent = kv_format(fields.get(name) if name else "fp32")
    channels = 2 * mine[0] * k_width + mine[1] * v_width
    conv = model_format(fields).payload_bytes(channels * (kernel - 1), "conv_state")
    size = recurrent.payload_bytes(mine[1] * v_width * k_width, "recurrent_state")
    rule = HitRule.exact_boundary()
    return [
        Cell("conv_state", conv, shape, rule, rows_per_page=1),
        Cell("recurrent_state", size, shape, rule, rows_per_page=1),
    ]


def _state_shape(fields: Fields) -> tuple[int, int, int, int, int]:
    """Key heads, key width, value heads, value width and convolution length of linear layers."""
    nested = fields.get("linear_attn_config")
    if isinstance(nested, Mapping):
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
        told = [check_integer(f"linear_attn_config.{n}", nested.get(n)) for n in names]
        return (told[0], told[1], told[0], told[1], told[2])
    if fields.has("linear_num_heads"):
        heads, width = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
        return (heads, width, heads, width, fields.integer("linear_conv_kernel_dim", low=2))
    needed = (
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    absent = [name for name in needed if not fields.has(name)]
    if absent:
        raise missing(*absent)
    return tuple(  # type: ignore[return-value]
        fields.integer(name, low=2 if name == needed[-1] else 1) for name in needed
    )


def model_format(fields: Fields) -> KVFormat:
    """The model's own dtype: bf16 if the config tells none."""
    name = fields.first("dtype", "torch_dtype")
    if name is None:
        return kv_format("bf16")
    told = fields.get(name)
    try:
        found = kv_format(told)
    except GeometryError as bad:
        raise GeometryError(
            f"config field {name} {told!r} is no dtype kvferry knows; give kv_dtype=, and "
            f"overrides={{'{name}': 'bfloat16'}} if the model has states"
        ) from bad
    if found.bits < 16:
        raise GeometryError(
            f"config field {name} {told!r} is no dtype of activations; correct it with "
            f"overrides={{'{name}': 'bfloat16'}}"
        )
    return found

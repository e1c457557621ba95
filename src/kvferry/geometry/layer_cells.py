"""What one layer of a model adds to its planes, in bytes of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvferry.errors import GeometryError, UnknownArchitectureError
from kvferry.geometry.hf_fields import (
    BY_HAND,
    BY_OVERRIDE,
    Fields,
    check_integer,
    missing,
    short,
)
from kvferry.geometry.kv_dtype import KVFormat, kv_format
from kvferry.geometry.layer_kinds import LayerKind
from kvferry.geometry.sharding import shard_heads
from kvferry.geometry.spec import HitRule

__all__ = [
    "FIELDS_OF_KIND",
    "Cell",
    "Rank",
    "cache_format",
    "index_cell",
    "layer_cells",
    "model_format",
    "refuse_uneven_heads",
    "without_latents_if_told",
]

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
_WINDOW_LATENTS = ("swa_kv_lora_rank", "swa_qk_rope_head_dim", "swa_qk_nope_head_dim")


# (type, bits) of a scheme, or the name of an algorithm, in lower case.
_TOLD_FORMATS = {
    "('float', 8)": "fp8_e4m3",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "nvfp4": "nvfp4",
}


FIELDS_OF_KIND: tuple[str, ...] = (
    *(name for names in _WIDTHS_OF_KIND.values() for name in names if name),
    *_WINDOW_LATENTS,
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


def refuse_uneven_heads(fields: Fields, tp: int) -> None:
    """Raise GeometryError where `tp` ranks cannot have equally many attention heads."""
    heads = fields.integer("num_attention_heads")
    if heads % tp:
        raise GeometryError(
            f"tp={tp} does not divide num_attention_heads {heads}, and each rank has as many; "
            f"choose another tp"
        )


def layer_cells(
    fields: Fields, kind: LayerKind, rank: Rank, *, is_sparse: bool = False
) -> list[Cell]:
    """What a layer of `kind` (any but SHARED) with `fields` keeps, its indexer key not counted.

    A layer that is sparse attends to what an indexer chose: its latent rows have a form of their
    own.
    """
    if kind is LayerKind.LINEAR:
        return _state_cells(fields, rank)
    if fields.has("kv_lora_rank"):
        return _latent_cells(fields, kind, rank, is_sparse)
    return _head_cells(fields, kind, rank)


def _head_cells(fields: Fields, kind: LayerKind, rank: Rank) -> list[Cell]:
    if rank.format.latent_rows_only:
        raise GeometryError(
            f"kv_dtype {rank.format.name} is a form of latent rows, and a layer of this model "
            f"keeps keys and values; choose fp8_e4m3"
        )
    suffix, rule = _kind_suffix(fields, kind)
    heads, k_width, v_width = _head_widths(fields, kind)
    shard = shard_heads(heads, tp=rank.tp, tp_rank=rank.tp_rank)
    mine, copies = shard.num_heads, len(shard.replicas)
    if copies > 1:
        fields.assume(
            f"{copies} ranks keep the same bytes of k{suffix} and v{suffix}: {heads} KV heads over "
            f"tp={rank.tp}"
        )
    cells: list[Cell] = []
    for name, width in ((f"k{suffix}", k_width), (f"v{suffix}", v_width)):
        cells += _valued_cells(name, mine, width, (heads, width), rule, rank.format)
    return cells


def _head_widths(fields: Fields, kind: LayerKind) -> tuple[int, int, int]:
    heads_name, k_name, v_name = _WIDTHS_OF_KIND[kind]
    if kind is LayerKind.FULL and not fields.flag("attention_k_eq_v", True):
        heads_name = ""  # the other head count goes with keys that serve as values
    all_heads = fields.integer("num_attention_heads")
    if not fields.has("num_key_value_heads"):
        fields.assume(f"num_key_value_heads is num_attention_heads, {all_heads}")
    heads = fields.integer("num_key_value_heads", all_heads)
    if all_heads % heads:
        raise GeometryError(
            f"num_key_value_heads {heads} does not divide num_attention_heads {all_heads}, and "
            f"equally many query heads share a KV head; correct one of the two"
        )
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
                f"config has no head_dim; add head_dim {BY_OVERRIDE}"
            )
        k_width = hidden // all_heads
        fields.assume(f"head_dim is hidden_size / num_attention_heads, {k_width}")
    else:
        k_width = fields.integer("head_dim")
    return heads, k_width, fields.integer("v_head_dim", k_width)


def _latent_cells(fields: Fields, kind: LayerKind, rank: Rank, is_sparse: bool) -> list[Cell]:
    if not fields.has("qk_rope_head_dim"):
        raise missing("qk_rope_head_dim (needed because kv_lora_rank is set)")
    suffix, rule = _kind_suffix(fields, kind)
    name = f"latent{suffix}"
    width, rope = _latent_widths(fields, kind)
    kept = rank.format
    if kept.latent_rows_only or (is_sparse and kept.keeps_row_scales):
        size = width + _row_scales("kv_lora_rank", width) + rope * _ROPE_BYTES
        # A third width, so that a layer with rows of this form shares no plane with one without.
        return [Cell(name, size, (width, rope, _ROW_SCALE_BLOCK), rule)]
    if not is_sparse:
        return _valued_cells(name, 1, width + rope, (width, rope), rule, kept)
    if kept.scale_block or kept.name == "fp8_e5m2":
        raise GeometryError(
            f"kv_dtype {kept.name}: the latent rows of sparse attention are known in bf16, fp16, "
            f"fp32, fp8_e4m3 and fp8_per_tensor; choose one of these, or {BY_HAND}"
        )
    return [Cell(name, kept.payload_bytes(width + rope, name), (width, rope), rule)]


def _latent_widths(fields: Fields, kind: LayerKind) -> tuple[int, int]:
    width, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim", low=0)
    if kind is not LayerKind.WINDOW or fields.get("per_layer_config"):
        return width, rope
    if not fields.has("swa_kv_lora_rank"):
        fields.assume("latents in a window are as wide as the others: no swa_kv_lora_rank is told")
    width = fields.integer("swa_kv_lora_rank", width)
    if fields.has("swa_qk_rope_head_dim"):
        return width, fields.integer("swa_qk_rope_head_dim", low=0)
    if fields.has("swa_qk_nope_head_dim"):
        head, nope = fields.integer("swa_head_dim"), fields.integer("swa_qk_nope_head_dim")
        return width, check_integer("swa_head_dim - swa_qk_nope_head_dim", head - nope, 0)
    return width, rope


def index_cell(fields: Fields) -> Cell:
    """The key that the indexer of a sparse-attention layer keeps.

    With latents it is fp8 with fp32 scales. Without, the raw key in the model's dtype: engines
    build what they index from it.
    """
    if fields.has("indexer_head_dim"):
        heads, width = fields.integer("indexer_kv_heads"), fields.integer("indexer_head_dim")
        if heads != 1:
            raise UnknownArchitectureError(
                f"config field indexer_kv_heads is {heads}; indexers with one key head are known. "
                f"Please {BY_HAND}"
            )
        # How many keys make a block is told too, but it is raw keys that are kept.
        fields.has("indexer_compress_ratio")
        fields.assume("indexer keys are kept one a token, in the model's dtype")
        size = model_format(fields).payload_bytes(width, "index_key")
        return Cell("index_key", size, (width,))
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
    if not name:
        fields.assume("recurrent states are fp32: no mamba_ssm_dtype is told")
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
        fields.assume("the dtype is bf16: neither dtype nor torch_dtype is told")
        return kv_format("bf16")
    told = fields.get(name)
    try:
        found = kv_format(told)
    except GeometryError as bad:
        raise GeometryError(
            f"config field {name} {told!r} is no dtype kvferry knows; give kv_dtype=, and "
            f"{name} {BY_OVERRIDE} if the model has states"
        ) from bad
    if found.bits < 16:
        raise GeometryError(
            f"config field {name} {told!r} is no dtype of activations; correct it with "
            f"{name}=bfloat16 {BY_OVERRIDE}"
        )
    return found


def cache_format(fields: Fields) -> KVFormat:
    """What `quantization_config` says that the cache is kept in; the model's own dtype if nothing.

    Raises GeometryError for a cache that is quantised in some other way than fp8 or nvfp4.
    """
    config = fields.get("quantization_config")
    told = {
        name: value
        for name, value in (config.items() if isinstance(config, Mapping) else ())
        if str(name).startswith("kv_cache") and value
    }
    for name, value in told.items():
        if name == "kv_cache_scheme" and isinstance(value, Mapping):
            value = (value.get("type"), value.get("num_bits"))
        found = _TOLD_FORMATS.get(str(value).lower())
        if found is None:
            raise GeometryError(
                f"quantization_config says {name} {short(value)}, which is no form of the cache "
                f"that kvferry reads there; give kv_dtype="
            )
        return kv_format(found)
    return model_format(fields)


def without_latents_if_told(fields: Fields) -> Fields:
    """`fields` as they are, or with ``use_mla: false`` honoured: plain attention, no latents.

    Such a config may say that values are 0 wide and mean that they are as wide as keys. Raises
    GeometryError for any other width of values, since nothing tells whether it applies.
    """
    if fields.flag("use_mla", True):
        return fields
    width = fields.integer("v_head_dim", 0, low=0)
    if width and width != fields.integer("head_dim", 0):
        raise GeometryError(
            f"config field v_head_dim is {width}, but use_mla is false and head_dim is not {width} "
            f"too; correct one of the three"
        )
    latents = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim", "v_head_dim")
    return fields.over(dict.fromkeys(latents))

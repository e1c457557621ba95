"""What each layer of a model caches, as far as its config tells.

A layer keeps every token (FULL), the tokens of a window (WINDOW), one recurrent state (LINEAR) or
nothing, because it reads another layer's cache (SHARED).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from kvferry.errors import GeometryError, UnknownArchitectureError
from kvferry.geometry.hf_fields import BY_HAND, Fields, check_integer, missing
from kvferry.geometry.model_types import assume_plain_attention

__all__ = ["INDEXED_NAMES", "LayerKind", "draft_count", "layer_kinds", "refuse_unknown"]


class LayerKind(enum.Enum):
    """What one layer caches."""

    FULL = "full"
    WINDOW = "window"
    LINEAR = "linear"
    SHARED = "shared"


INDEXED_NAMES = ("indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention")
"""Names in `layer_types` of layers that choose their tokens with an indexer."""

_KIND_NAMES = {
    "full_attention": LayerKind.FULL,
    **dict.fromkeys(INDEXED_NAMES, LayerKind.FULL),
    "sliding_attention": LayerKind.WINDOW,
    "chunked_attention": LayerKind.WINDOW,
    "linear_attention": LayerKind.LINEAR,
}

# A config with one of these set caches something that the fields kvferry reads do not describe.
# Guessing plain attention there would give planes of the wrong size.
_NOT_UNDERSTOOD = (
    "attention_other_setting",
    "attn_layer_period",
    "block_configs",
    "block_types",
    "compress_rates",
    "compress_ratios",
    "conv_L_cache",
    "cross_attention_layers",
    "hybrid_layer_ids",
    "hybrid_override_pattern",
    "index_block_size",
    "index_kpool",
    "is_encoder_decoder",
    "kv_channels",
    "kv_n_heads",
    "layers_block_type",
    "lru_width",
    "mamba_d_ssm",
    "mamba_d_state",
    "mamba_num_heads",
    "mb_per_layer",
    "multi_query",
    "multi_query_attention",
    "multi_query_group_num",
    "n_head_kv",
    "n_kv_heads",
    "new_decoder_architecture",
    "num_attention_groups",
    "num_kv_groups",
    "num_kv_heads",
    "num_query_groups",
    "ple_layer_ids",
    "sconv_kernel_size",
    "ssm_state_size",
    "state_size",
    "use_cla",
)

# Layers of one kind may be wider than those of another: then which layers are which must be told.
_NEEDS_KINDS = (
    "global_head_dim",
    "num_global_key_value_heads",
    "swa_head_dim",
    "swa_num_key_value_heads",
    "swa_v_head_dim",
    "linear_num_value_heads",
    "linear_num_heads",
)

# Other names for the width of a head. Without head_dim they would have to be read, and which of
# them a model goes by is not to be guessed.
_OTHER_WIDTHS = (
    "attention_head_dim",
    "attention_head_size",
    "d_head",
    "d_kv",
    "head_size",
    "key_size",
    "qk_head_dim",
    "qk_nope_head_dim",
    "size_per_head",
)

_WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size")

_DRAFT_COUNTS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "mtp_num_layers",
)


def refuse_unknown(fields: Fields) -> None:
    """Raise UnknownArchitectureError for a config whose cache these rules do not describe."""
    found = [name for name in _NOT_UNDERSTOOD if fields.get(name)]
    kinds = fields.get("attn_type_list")
    if isinstance(kinds, list) and any(kind != 1 for kind in kinds):
        found.append("attn_type_list")
    if fields.has("index_head_dim") and not fields.has("kv_lora_rank"):
        found.append("index_head_dim without kv_lora_rank")
    if not fields.has("kv_lora_rank") and not fields.has("head_dim"):
        widths = [name for name in _OTHER_WIDTHS if fields.get(name)]
        found += [f"{name} without head_dim" for name in widths]
    if fields.integer("number_of_conv_states", 1) > 1:
        found.append("number_of_conv_states")
    found += [f"{name} as a list" for name in _WINDOWS if isinstance(fields.get(name), list)]
    if found:
        raise UnknownArchitectureError(
            f"this config describes a cache that kvferry has no rule for (model_type "
            f"{fields.get('model_type')!r}); fields not understood: {', '.join(found)}. "
            f"Please {BY_HAND}"
        )


def draft_count(fields: Fields) -> int:
    """How many draft layers the config tells of; 0 if it tells of none."""
    name = fields.first(*_DRAFT_COUNTS)
    return 0 if name is None else fields.integer(name, low=0)


def layer_kinds(fields: Fields, num_layers: int, num_draft: int) -> tuple[LayerKind, ...]:
    """The kind of each of `num_layers` layers, and then of `num_draft` draft layers.

    A config that gives a window and does not say which layers have it counts as FULL throughout:
    asking for more pages than a window needs is never wrong.
    """
    told = _told_kinds(fields, num_layers)
    kinds, drafts = list(told[:num_layers]), list(told[num_layers:])
    shared = fields.integer("num_kv_shared_layers", 0, low=0)
    if shared:
        if shared >= num_layers:
            raise GeometryError(
                f"num_kv_shared_layers {shared} leaves none of {num_layers} layers a cache"
            )
        kinds[-shared:] = [LayerKind.SHARED] * shared
    if fields.has("mtp_layer_types"):
        drafts = _named_kinds("mtp_layer_types", fields.sequence("mtp_layer_types"))
    if len(drafts) not in (0, num_draft):
        raise GeometryError(
            f"the config names the kinds of {len(drafts)} layers after the {num_layers} of the "
            f"model, but has {num_draft} draft layers; correct layer_types or num_hidden_layers"
        )
    return (*kinds, *(drafts or [LayerKind.FULL] * num_draft))


def _told_kinds(fields: Fields, num_layers: int) -> Sequence[LayerKind]:
    if fields.has("layer_types"):
        return _checked("layer_types", fields, num_layers, _named_kinds)
    if fields.has("hybrid_layer_pattern"):
        return _checked("hybrid_layer_pattern", fields, num_layers, _window_bits)
    if fields.has("linear_attn_config"):
        return _kinds_by_lists(fields.get("linear_attn_config"), num_layers)
    if fields.has("full_attention_interval"):
        every = fields.integer("full_attention_interval")
        return _every(every, LayerKind.LINEAR, num_layers)
    has_window = fields.first("sliding_window", "sliding_window_size") is not None
    if not has_window or not fields.flag("use_sliding_window", True):
        _need_kinds(fields)
        assume_plain_attention(fields)
        return [LayerKind.FULL] * num_layers
    name = fields.first(
        "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"
    )
    if name is not None:
        pattern = fields.get(name)
        if isinstance(pattern, str):
            return _lettered(name, pattern, num_layers)
        return _every(fields.integer(name), LayerKind.WINDOW, num_layers)
    if fields.has("use_sliding_window") and fields.has("max_window_layers"):
        first = min(fields.integer("max_window_layers", low=0), num_layers)
        return [LayerKind.FULL] * first + [LayerKind.WINDOW] * (num_layers - first)
    _need_kinds(fields)
    fields.assume("every layer keeps all tokens: there is a window, but not which layers have it")
    return [LayerKind.FULL] * num_layers


def _need_kinds(fields: Fields) -> None:
    why = fields.first(*_NEEDS_KINDS)
    if why is not None:
        raise missing(f"layer_types (needed because {why} is set)")


def _checked(name: str, fields: Fields, num_layers: int, read: Any) -> list[LayerKind]:
    kinds: list[LayerKind] = read(name, fields.sequence(name))
    if len(kinds) < num_layers:
        raise GeometryError(
            f"config field {name} names {len(kinds)} layers, but num_hidden_layers is {num_layers}"
        )
    return kinds


def _named_kinds(name: str, told: Sequence[Any]) -> list[LayerKind]:
    unknown = sorted({repr(kind) for kind in told if kind not in list(_KIND_NAMES)})
    if unknown:
        raise UnknownArchitectureError(
            f"config field {name} has layers that kvferry has no rule for: {', '.join(unknown)} "
            f"(known: {', '.join(_KIND_NAMES)}). Please {BY_HAND}"
        )
    return [_KIND_NAMES[kind] for kind in told]


def _window_bits(name: str, told: Sequence[Any]) -> list[LayerKind]:
    if any(bit not in (0, 1) for bit in told):
        raise GeometryError(f"config field {name} must have 0 (full) or 1 (window) for each layer")
    return [LayerKind.WINDOW if bit else LayerKind.FULL for bit in told]


def _lettered(name: str, pattern: str, num_layers: int) -> list[LayerKind]:
    if not pattern or set(pattern) - {"L", "G"}:
        raise GeometryError(
            f"config field {name} must be a number or letters L and G, not {pattern!r}"
        )
    return [
        LayerKind.WINDOW if pattern[i % len(pattern)] == "L" else LayerKind.FULL
        for i in range(num_layers)
    ]


def _every(every: int, between: LayerKind, num_layers: int) -> list[LayerKind]:
    return [between if (i + 1) % every else LayerKind.FULL for i in range(num_layers)]


def _kinds_by_lists(told: Any, num_layers: int) -> list[LayerKind]:
    # These lists count layers from one.
    lists = {"full_attn_layers": LayerKind.FULL, "kda_layers": LayerKind.LINEAR}
    if not isinstance(told, dict) or not all(isinstance(told.get(n), list) for n in lists):
        raise missing(*(f"linear_attn_config.{name}" for name in lists))
    kinds: dict[int, LayerKind] = {}
    for name, kind in lists.items():
        kinds.update({check_integer(name, layer) - 1: kind for layer in told[name]})
    if sorted(kinds) != list(range(num_layers)):
        raise GeometryError(
            f"linear_attn_config names {len(kinds)} layers, but num_hidden_layers is {num_layers}: "
            f"name each layer once, counting from 1"
        )
    return [kinds[i] for i in range(num_layers)]

"""Config fields that tell something of each layer by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvferry.errors import GeometryError, UnknownArchitectureError
from kvferry.geometry.hf_fields import BY_HAND, Fields, check_integer, short

__all__ = ["per_layer_fields", "refuse_unread_lists"]

# Lists with an entry a layer, and the field that an entry stands for.
_LISTS: Mapping[str, str] = {
    "num_key_value_heads_per_layer": "num_key_value_heads",
    "num_attention_heads_per_layer": "num_attention_heads",
}

# What a name has in it that tells how much a layer keeps.
_SIZES = re.compile(
    r"(^|_)(kv|k|v|qk|q?k?v?_?heads?|head_?dims?|keys?|values?|windows?|lora|ranks?|latents?"
    r"|states?|cache)(_|$)",
    re.IGNORECASE,
)


def per_layer_fields(fields: Fields, num_layers: int, num_all: int) -> Mapping[int, Fields]:
    """The fields of every layer that has some of its own, the other fields behind them.

    Draft layers are those from `num_layers` up to `num_all`. Raises GeometryError for entries of
    layers that do not exist, or that are no fields.
    """
    found: dict[int, dict[str, Any]] = {}
    for name, field in _LISTS.items():
        if fields.has(name):
            told = fields.sequence(name)
            if len(told) not in (num_layers, num_all):
                raise GeometryError(
                    f"config field {name} has {len(told)} entries, but there are {num_layers} "
                    f"layers; give one for each"
                )
            for layer, value in enumerate(told):
                entry = check_integer(f"{name}[{layer}]", value)
                found.setdefault(layer, {})[field] = entry
    for layer, more in _told_by_mapping(fields, num_all).items():
        found.setdefault(layer, {}).update(more)
    return {layer: fields.over(more) for layer, more in found.items()}


def refuse_unread_lists(fields: Fields, num_layers: int) -> None:
    """Raise UnknownArchitectureError for a list that tells a size of each layer and was not read.

    To be called last, when the rules have read what they read.
    """
    sources = fields.get("kv_source_layers")
    found = [
        name
        for name in fields.unread()
        if isinstance(name, str) and _SIZES.search(name) and _is_told(fields, name, num_layers)
    ]
    # A layer that is its own source keeps its own cache.
    if sources and sources != list(range(num_layers)):
        found.append("kv_source_layers")
    if found:
        raise UnknownArchitectureError(
            f"this config tells sizes layer by layer in a way that kvferry has no rule for; fields "
            f"not understood: {', '.join(found)}. Please {BY_HAND}"
        )


def _is_told(fields: Fields, name: str, num_layers: int) -> bool:
    value = fields.get(name)
    if isinstance(value, list | tuple):
        return len(value) >= num_layers
    return isinstance(value, Mapping) and bool(value) and name.endswith("_per_layer")


def _told_by_mapping(fields: Fields, num_all: int) -> Mapping[int, Mapping[str, Any]]:
    told = fields.get("per_layer_config") or {}
    if not isinstance(told, Mapping):
        raise GeometryError(
            f"config field per_layer_config must map layers to fields, not {type(told).__name__}"
        )
    found: dict[int, Mapping[str, Any]] = {}
    for layer, more in told.items():
        text = str(layer)
        if not (text.isascii() and text.isdigit()) or not isinstance(more, Mapping):
            raise GeometryError(
                f"config field per_layer_config must map layer numbers to fields; "
                f"it has {short(layer)}: {type(more).__name__}"
            )
        if len(text) > 9 or int(text) >= num_all:
            raise GeometryError(
                f"config field per_layer_config has an entry for layer {short(layer)}, but the "
                f"layers are 0 to {num_all - 1}; correct it or num_hidden_layers"
            )
        found[int(text)] = more
    return found

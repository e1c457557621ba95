"""Which models `PrefixCache` serves, and what of a model is part of a page's key."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvferry.adapters.transformers.cache_shape import cache_keyword
from kvferry.adapters.transformers.layer_parts import new_cache
from kvferry.errors import ConfigError, GeometryError

__all__ = ["check_model", "config_digest", "probe"]

_WITHOUT_MEANING = ("transformers_version", "_name_or_path")


def check_model(model: Any, *, has_lora: bool) -> None:
    """Raise for a model whose caches must not be kept as it is now.

    Args:
        model: A transformers model.
        has_lora: Whether the adapter on its weights, if any, is part of the keys.

    Raises:
        GeometryError: It is an encoder and a decoder.
        ConfigError: It is in training mode, or has an adapter that nobody named.
    """
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise GeometryError(
            f"{name} is an encoder and a decoder; models that are a decoder alone are served"
        )
    if model.training:
        raise ConfigError(
            f"{name} is in training mode, where dropout makes every cache another; call "
            f"model.eval() first"
        )
    has_adapter = hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)
    if has_adapter and not has_lora:
        raise ConfigError(
            f"{name} has an adapter on its weights; name it with PrefixCache(..., lora='...'), one "
            f"PrefixCache for each adapter"
        )


def config_digest(config: Any) -> str:
    """Hex that differs where two configs of a model compute differently."""
    told = {name: value for name, value in config.to_dict().items() if name not in _WITHOUT_MEANING}
    told["attention"] = str(config._attn_implementation)
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def probe(model: Any) -> Any:
    """A cache of one token: what the model keeps of it tells the planes."""
    cache = new_cache(model.config)
    told = {cache_keyword(model): cache, "use_cache": True}
    import torch

    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(token, **told)
    return cache

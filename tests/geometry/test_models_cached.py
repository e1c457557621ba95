"""The planes of a config against the cache that the model itself fills, in its own library."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.geometry.models import geometry_from_hf_config

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

_TOKENS = 5
_TINY = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
_MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_hidden_layers": 4, "num_local_experts": 4},
    "gemma4_text": {
        "num_hidden_layers": 12,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 6,
        "vocab_size_per_layer_input": 32,
        "hidden_size_per_layer_input": 8,
    },
    "mimo_v2_flash": {
        "num_hidden_layers": 6,
        "head_dim": 24,
        "v_head_dim": 16,
        "n_routed_experts": 4,
    },
    "deepseek_v3": {
        "num_hidden_layers": 2,
        "head_dim": 8,
        "kv_lora_rank": 32,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", _MODELS)
def test_planes_are_what_the_model_caches(model_type: str) -> None:
    """Layer by layer, the planes hold as many bytes a token as the cache of a tiny model does."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config = transformers.CONFIG_MAPPING[model_type](**{**_TINY, **_MODELS[model_type]})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.inference_mode():
        cache = model(torch.arange(_TOKENS)[None], use_cache=True).past_key_values
    cached = {
        layer: (filled.keys.nbytes + filled.values.nbytes) // _TOKENS
        for layer, filled in enumerate(cache.layers)
        if getattr(filled, "keys", None) is not None
    }
    told: dict[int, int] = {}
    for plane in geometry_from_hf_config(model.config).planes:
        for layer in plane.model_layers:
            told[layer] = told.get(layer, 0) + plane.element_size
    assert told == cached

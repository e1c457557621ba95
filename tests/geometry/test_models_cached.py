"""The planes of a config against the cache that the model itself fills, in its own library."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.geometry.models import geometry_from_hf_config
from kvferry.types import SlotKind

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
    "qwen4_exp_text": {
        "num_hidden_layers": 8,
        "head_dim": 32,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 48,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
        },
    },
    "dots3_note_text": {
        "num_hidden_layers": 7,
        "pad_token_id": 0,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "index_head_dim": 128,
        "index_n_heads": 2,
        "index_topk": 4,
        "n_routed_experts": 8,
        "shared_experts_intermediate_size": 16,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 48,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
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
    "deepseek_v32": {
        "num_hidden_layers": 2,
        "head_dim": 8,
        "kv_lora_rank": 32,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_key_value_heads": 4,
        "index_head_dim": 128,
        "index_n_heads": 2,
        "index_topk": 4,
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
        output = model(torch.arange(_TOKENS)[None], use_cache=True)
    cache = getattr(output, "cache", None) or output.past_key_values
    # Engines keep the indexer keys of latent attention as fp8 with scales, transformers does not:
    # there, the layers are compared, and the width is that of the values.
    keys_are_fp8 = "kv_lora_rank" in _MODELS[model_type]
    filled: dict[int, int] = {}
    indexed: dict[int, int] = {}
    for layer, kept in enumerate(cache.layers):
        if getattr(kept, "keys", None) is not None:
            filled[layer] = (kept.keys.nbytes + kept.values.nbytes) // _TOKENS
        if getattr(kept, "indexer_keys", None) is not None:
            width = kept.indexer_keys.shape[-1]
            of_fp8 = width + 4 * width // 128
            indexed[layer] = of_fp8 if keys_are_fp8 else kept.indexer_keys.nbytes // _TOKENS
    told: dict[int, int] = {}
    told_indexed: dict[int, int] = {}
    for plane in geometry_from_hf_config(model.config).planes:
        if plane.slot_kind is SlotKind.PAGE:
            into = told_indexed if plane.name == "index_key" else told
            for layer in plane.model_layers:
                into[layer] = into.get(layer, 0) + plane.element_size
    assert told == filled
    assert told_indexed == indexed
    assert bool(indexed) == (model_type in ("qwen4_exp_text", "dots3_note_text", "deepseek_v32"))

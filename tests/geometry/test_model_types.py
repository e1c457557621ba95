"""Model types nobody has looked at: what is assumed of them, and what is too much to assume."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvferry.errors import GeometryError, UnknownArchitectureError
from kvferry.geometry import read_hf_config
from kvferry.geometry.models import geometry_from_hf_config

_PLAIN: dict[str, Any] = {
    "vocab_size": 32000,
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conv_kernel", 4),
        ("d_conv", 4),
        ("short_conv_kernel_size", 4),
        ("ssm_cfg", {"d_state": 16}),
        ("ssm_expand", 2),
        ("mamba2_headdim", 64),
        ("rwkv_head_size", 64),
        ("recurrent_block_type", "gru"),
        ("recurrence_width", 512),
        ("retention_heads", 8),
        ("matrix_state_size", 64),
        ("d_state", 16),
        ("num_states", 3),
        ("xlstm_heads", 4),
        ("latent_dim", 512),
        ("kv_latent_dim", 512),
        ("kv_compression", 4),
        ("kv_sharing_map", [0, 0, 1, 1]),
        ("compressed_tokens", 4),
        ("compression_ratio", 8),
        ("hybrid_schedule", [0, 1]),
        ("cross_layer_kv", True),
        ("num_memory_tokens", 16),
        ("attention_types", [[["global", "local"], 12]]),
        ("attn_type", "linear"),
    ],
)
@pytest.mark.parametrize("model_type", [None, "brand_new"])
def test_suspicious_fields_of_unknown_models_are_refused(
    field: str, value: Any, model_type: str | None
) -> None:
    """States, convolutions, compressed and shared KV are not guessed away; the field is named."""
    config = {**_PLAIN, "model_type": model_type, field: value}
    with pytest.raises(UnknownArchitectureError, match=rf"\b{field}\b") as refused:
        geometry_from_hf_config(config)
    assert f"--override {field}=null" in str(refused.value)
    assert "model_type" in str(refused.value)
    assert geometry_from_hf_config(config, overrides={field: None}) == geometry_from_hf_config(
        _PLAIN
    )


@pytest.mark.parametrize("model_type", [None, "brand_new", "llama", "qwen3_moe"])
def test_fields_of_real_plain_models_are_no_reason(model_type: str | None) -> None:
    """What Llama-like configs hold beside their sizes is passed over, known type or not."""
    more = {
        "model_type": model_type,
        "architectures": ["BrandNewForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attn_implementation": "flash_attention_2",
        "attn_logit_softcapping": 50.0,
        "attention_multiplier": 0.5,
        "attention_type": "grouped_query",
        "attention_value_scale": 0.7,
        "attn_temperature_tuning": True,
        "query_pre_attn_scalar": 256,
        "qkv_bias": True,
        "kv_bias": True,
        "kv_cache_dtype": "auto",
        "use_qk_norm": True,
        "k_norm": True,
        "clip_qkv": 8.0,
        "max_window_layers": 24,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "rope_parameters": {"rope_type": "default"},
        "rope_theta": 500000.0,
        "partial_rotary_factor": 0.5,
        "output_hidden_states": True,
        "num_local_experts": 8,
        "moe_latent_size": 1024,
        "moe_layer_freq": 1,
        "mlp_layer_types": ["dense"] * 24,
        "num_experts_per_tok": 2,
        "vision_conv_size": 14,
        "audio_state_size": 3,
        "residual_multiplier": 0.2,
        "initializer_range": 0.02,
        "memory_efficient_attention": True,
        "tie_word_embeddings": True,
        "use_cache": True,
        "pretraining_tp": 1,
        "quantization_config": {"kv_cache_scheme": None},
        "auto_map": {"AutoConfig": "configuration.BrandNewConfig"},
    }
    assert geometry_from_hf_config({**_PLAIN, **more}) == geometry_from_hf_config(_PLAIN)


def test_fields_that_are_off_are_no_reason() -> None:
    """Null, false, 0 and empty say that the thing is not there."""
    off: dict[str, Any] = {
        "ssm_cfg": None,
        "latent_dim": 0,
        "use_conv": False,
        "kv_sharing_map": [],
        "d_state": {},
    }
    assert geometry_from_hf_config({**_PLAIN, **off}) == geometry_from_hf_config(_PLAIN)


@pytest.mark.parametrize(
    ("config", "assumed"),
    [
        ({**_PLAIN, "model_type": "llama"}, []),
        (_PLAIN, ["every layer keeps all tokens: the config has no model_type, and no field"]),
        ({**_PLAIN, "model_type": "new"}, ["every layer keeps all tokens: .* model_type 'new'"]),
        ({**_PLAIN, "model_type": "llama", "head_dim": None}, ["head_dim is .* 128"]),
        (
            {**_PLAIN, "model_type": "llama", "num_key_value_heads": None},
            ["num_key_value_heads is num_attention_heads, 16"],
        ),
        ({**_PLAIN, "model_type": "llama", "torch_dtype": None}, ["the dtype is bf16"]),
        (
            {**_PLAIN, "model_type": "mistral", "sliding_window": 4096},
            ["every layer keeps all tokens: there is a window"],
        ),
        (
            {**_PLAIN, "model_type": "gpt_oss", "head_dim": 64},
            ["sliding_window is 128, as gpt_oss", "sliding_window_pattern is 2, as gpt_oss"],
        ),
        (
            {
                "model_type": "deepseek_v32",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "index_head_dim": 128,
                "dtype": "bfloat16",
            },
            ["every layer keeps an indexer key of its own"],
        ),
    ],
)
def test_what_is_assumed_is_told(config: dict[str, Any], assumed: list[str]) -> None:
    """Each thing a config does not tell and that was taken for granted is one sentence."""
    told = read_hf_config(config).assumed
    assert len(told) == len(assumed)
    for sentence, expected in zip(sorted(told), sorted(assumed), strict=True):
        assert re.match(expected, sentence), f"{sentence!r} does not say {expected!r}"


_LATENTS = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_nextn_predict_layers": 1,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "options", "assumed"),
    [
        ({**_PLAIN, "model_type": "llama"}, {"tp": 8}, ["^2 ranks keep the same bytes of k and v"]),
        ({**_PLAIN, "model_type": "llama"}, {"tp": 4}, []),
        (_LATENTS, {}, ["1 draft layer of the model is left out: draft_layers brings"]),
        (_LATENTS, {"draft_layers": "layers"}, []),
        (
            _LATENTS,
            {"draft_layers": "planes", "tp": 8},
            ["all 8 tp ranks keep the same bytes of latent, draft_latent: tp does not split"],
        ),
        (
            _LATENTS,
            {"draft_layers": "layers", "pp": 4},
            ["pipeline stages have 16, 15, 15, 15 layers: engines differ"],
        ),
        (
            _LATENTS,
            {"draft_layers": "layers", "pp": 9},
            [r"pipeline stages have 7 \(x 7\), then 6 \(x 2\) layers: engines differ"],
        ),
        (_LATENTS, {"draft_layers": "layers", "pp_layers": (15, 15, 16, 15)}, []),
    ],
)
def test_what_is_assumed_of_ranks_and_stages_is_told(
    config: dict[str, Any], options: dict[str, Any], assumed: list[str]
) -> None:
    """Replicated planes, draft layers that are left out, and the split over stages."""
    told = read_hf_config(config, **options).assumed
    assert len(told) == len(assumed), told
    for sentence, expected in zip(told, assumed, strict=True):
        assert re.match(expected, sentence), f"{sentence!r} does not say {expected!r}"


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    """Also where the cache itself would not be split."""
    with pytest.raises(GeometryError, match=r"tp=3 does not divide num_attention_heads 128"):
        read_hf_config(_LATENTS, tp=3)


def test_fields_of_older_models_are_hints() -> None:
    """Their config is refused with what they may mean, and read when somebody says so."""
    config = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_ctx": 1024}
    with pytest.raises(UnknownArchitectureError) as refused:
        read_hf_config(config)
    message = str(refused.value)
    assert "missing fields: num_hidden_layers, num_attention_heads. It has n_layer 12," in message
    assert "--override num_attention_heads=12 --override hidden_size=768" in message
    assert "by hand" in message
    named = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768}
    assert read_hf_config(config, overrides=named).geometry.bytes_per_token == 2 * 12 * 768 * 2

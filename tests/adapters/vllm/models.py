"""Tiny models whose outputs depend on their KV, written to a folder as safetensors.

Weights have a standard deviation of 1/sqrt(fan_in): with the tiny ones that a dummy loader makes,
zeros in place of the KV would change no token.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

VOCABULARY = 512
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gqa": {
        **_BASE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
    },
    "window": {
        **_BASE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 96,
    },
    "mla": {
        **_BASE,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
    },
}


def _shapes(kind: str) -> dict[str, tuple[int, ...]]:
    config = CONFIGS[kind]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = (hidden,)
        for name, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            shapes[f"{at}mlp.{name}.weight"] = shape
        at += "self_attn."
        if "head_dim" in config:
            dim, few = config["head_dim"], config["num_key_value_heads"]
            shapes[f"{at}q_proj.weight"] = (heads * dim, hidden)
            shapes[f"{at}k_proj.weight"] = (few * dim, hidden)
            shapes[f"{at}v_proj.weight"] = (few * dim, hidden)
            shapes[f"{at}o_proj.weight"] = (hidden, heads * dim)
        else:
            nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
            value, rank = config["v_head_dim"], config["kv_lora_rank"]
            shapes[f"{at}q_proj.weight"] = (heads * (nope + rope), hidden)
            shapes[f"{at}kv_a_proj_with_mqa.weight"] = (rank + rope, hidden)
            shapes[f"{at}kv_a_layernorm.weight"] = (rank,)
            shapes[f"{at}kv_b_proj.weight"] = (heads * (nope + value), rank)
            shapes[f"{at}o_proj.weight"] = (hidden, heads * value)
    return shapes


def write_model(folder: Path, kind: str) -> None:
    """Write a model of `kind`, the same each time."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    rng = torch.Generator().manual_seed(11)
    weights = {}
    for name, shape in _shapes(kind).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            scale = 1.0 if "embed" in name else 1 / math.sqrt(shape[-1])
            weights[name] = torch.randn(shape, generator=rng) * scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**CONFIGS[kind], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))


def write_adapter(folder: Path, config: dict[str, Any], rank: int = 8) -> None:
    """Write an adapter for the values of a model with `config`, the same each time."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    rng = torch.Generator().manual_seed(12)
    sizes = config["num_key_value_heads"] * config["head_dim"], config["hidden_size"]
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"base_model.model.model.layers.{layer}.self_attn.v_proj."
        for name, shape in (("lora_A", (rank, sizes[1])), ("lora_B", (sizes[0], rank))):
            drawn = torch.randn(shape, generator=rng) / math.sqrt(shape[-1])
            weights[f"{at}{name}.weight"] = drawn
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(told))

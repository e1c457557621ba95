"""Tiny random models of each kind of cache, whose outputs depend on every byte of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from kvferry.adapters.transformers import cache_keyword
from kvferry.testing import assert_bytes_equal

PAGE = 16
VOCABULARY = 97
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,  # or some models say the last token again and again
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_LINEAR = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
}

# Config, model, and what its config has beside the sizes above. Windows are of 24 tokens: neither a
# page, nor whole pages.
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gqa": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mla": ("DeepseekV3Config", "DeepseekV3ForCausalLM", MLA),
    "window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 24}),
    "some_windows": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 24}),
    "linear": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_LINEAR, **_EXPERTS}),
    "linear_dense": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _LINEAR),
}
KINDS = tuple(_KINDS)
WITH_STATES = tuple(kind for kind in KINDS if kind not in ("gqa", "mla"))


@functools.cache
def model_of(kind: str, dtype: torch.dtype = torch.float32, seed: int = 7) -> Any:
    """A random model, std = 1/√fan_in."""
    config, model, told = _KINDS[kind]
    torch.manual_seed(seed)
    made = getattr(transformers, model)(getattr(transformers, config)(**{**_SMALL, **told}))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim > 1:
                fan_in = 1 if "embed" in name else weight.shape[-1]
                weight.normal_(std=fan_in**-0.5)
    made.generation_config.pad_token_id = 0
    return made.eval().to(DEVICE, dtype)


def tokens(count: int, seed: int = 1, batch: int = 1) -> torch.Tensor:
    """Shape ``[batch, count]``; none is 0, the padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, count), generator=generator).to(DEVICE)


def new_cache(model: Any) -> Any:
    """An empty one."""
    return transformers.DynamicCache(config=model.config)


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, cache: Any, **told: Any) -> torch.Tensor:
    """The logits, shape ``[B, T, V]``; the cache grows."""
    logits: torch.Tensor = model(
        ids, use_cache=True, **{cache_keyword(model): cache}, **told
    ).logits
    return logits


def prefilled(model: Any, *chunks: torch.Tensor) -> Any:
    """A cache, computed anew, of tokens in these steps."""
    cache = new_cache(model)
    for chunk in chunks:
        forward(model, chunk, cache)
    return cache


def cache_tensors(cache: Any) -> dict[str, torch.Tensor]:
    """All that a cache holds, by layer and name."""
    found: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if tensor is not None:
                found[f"layer {number} {name}"] = tensor
        for name in ("conv_states", "recurrent_states"):
            for index, tensor in getattr(layer, name, {}).items():
                if tensor is not None:
                    found[f"layer {number} {name} {index}"] = tensor
    return found


def assert_equal_tensors(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Dtype, shape and bytes are equal."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    one, other = (
        tensor.detach().cpu().contiguous().view(torch.uint8).numpy() for tensor in (found, expected)
    )
    assert_bytes_equal(one, other, what=what)


def assert_equal_caches(found: Any, expected: Any) -> None:
    """All that both hold is equal, and so is how many tokens they say that is."""
    found_tensors, expected_tensors = cache_tensors(found), cache_tensors(expected)
    assert found_tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert_equal_tensors(found_tensors[name], tensor, name)
    lengths = [
        [layer.get_seq_length() for layer in cache.layers if hasattr(layer, "keys")]
        for cache in (found, expected)
    ]
    assert lengths[0] == lengths[1]

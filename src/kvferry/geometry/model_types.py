"""Which model types are known, and what in the config of another one says "not plain attention".

A config tells widths and counts, and a field that no rule reads may tell of a cache that none of
them describes. For a model type that is known, somebody has looked; for any other, a field whose
name speaks of states, convolutions, compressed or shared KV is a reason to refuse.
"""

from __future__ import annotations

import re
from typing import Any

from kvferry.errors import UnknownArchitectureError
from kvferry.geometry.hf_fields import BY_HAND, Fields, short

__all__ = ["KNOWN_MODEL_TYPES", "assume_plain_attention", "refuse_suspicious"]

KNOWN_MODEL_TYPES: frozenset[str] = frozenset(
    {
        *("afmoe", "apertus", "arcee", "bailing_hybrid", "bitnet", "cohere", "cohere2", "cwm"),
        *(
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots1",
            "dots3_note_text",
            "ernie4_5",
            "ernie4_5_moe",
        ),
        *("exaone", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3"),
        *("gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "glm", "glm4"),
        *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", "gpt_oss", "granite"),
        *("granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        *("internlm3", "kimi_k2", "kimi_linear", "llama", "llama4", "llama4_text"),
        *("mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral"),
        *("mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "persimmon"),
        *("phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text"),
        *("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"),
        *("qwen3_next", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen4_exp_text", "seed_oss"),
        *("smollm3",),
        *("solar_open", "stablelm", "starcoder2", "vaultgemma"),
    }
)
"""Values of ``model_type`` whose caches the rules are known to describe."""

_PARTS = (
    *("ssm", r"mamba\d*", r"rwkv\d*", "s?conv", "lru", "retention", "recurren(t|ce)", "hyena"),
    *("[xsm]lstm", "lstm", "states?", "latent", r"compress\w*", "hybrid", "cross", "kv"),
    *(r"(n|num)_mem(ory)?", r"mem(ory)?_(size|len|length|dim|tokens)", r"attn_types?"),
    r"attention_types?",
)
_SUSPICIOUS = re.compile(rf"(^|_)({'|'.join(_PARTS)})(_|$)", re.IGNORECASE)
# Parts that neither cache nor look at the cache, and sizes of nothing that is cached.
_HARMLESS = re.compile(
    r"^(output|return|vision|audio|image|video|speech|mm|moe)_|^kv_cache_"
    r"|_(bias|dropout|norm|eps|act|activation|init|std|scale|prob)$",
    re.IGNORECASE,
)
_PLAIN_KINDS = re.compile(
    r"full|causal|[mg]q?[hq]a|group|multi.?head|flash|sdpa|eager|softmax", re.IGNORECASE
)


def assume_plain_attention(fields: Fields) -> None:
    """Note that for an unknown model type only the lack of fields says: all tokens are kept."""
    model_type = fields.get("model_type")
    if not _is_known(model_type):
        fields.assume(
            f"every layer keeps all tokens: {_named(model_type)}, and no field says otherwise"
        )


def refuse_suspicious(fields: Fields) -> None:
    """Raise UnknownArchitectureError for an unknown model type with fields that hint at more.

    To be called last, when the rules have read what they read.
    """
    model_type = fields.get("model_type")
    if _is_known(model_type):
        return
    found = [
        name for name in fields.unread() if _hints(name) and _says_more(name, fields.get(name))
    ]
    if found:
        raise UnknownArchitectureError(
            f"{_named(model_type)}, and its config has fields that may tell of a cache which "
            f"kvferry has no rule for: {', '.join(found)}. If they do not, put null in their place "
            f"(overrides={{'{found[0]}': None}}, or --override {found[0]}=null); if they do, "
            f"{BY_HAND}"
        )


def _is_known(model_type: Any) -> bool:
    return isinstance(model_type, str) and model_type in KNOWN_MODEL_TYPES


def _hints(name: Any) -> bool:
    if not isinstance(name, str):
        return False
    return bool(_SUSPICIOUS.search(name)) and not _HARMLESS.search(name)


def _says_more(name: str, value: Any) -> bool:
    is_kind = re.search(r"_types?$", name, re.IGNORECASE)
    if is_kind and isinstance(value, str) and _PLAIN_KINDS.search(value):
        return False
    return bool(value)


def _named(model_type: Any) -> str:
    if model_type is None:
        return "the config has no model_type"
    return f"kvferry does not know model_type {short(model_type)}"

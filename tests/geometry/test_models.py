"""Geometries of real configs: golden sizes, shards, and configs that must be refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import GeometryError, UnknownArchitectureError
from kvferry.geometry import Geometry, HitRule
from kvferry.geometry.models import geometry_from_hf_config

Config = dict[str, Any]

TPS = (1, 2, 4, 8)


def gqa(layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> Config:
    """A config with plain grouped-query attention."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "torch_dtype": "bfloat16",
        **more,
    }


def mla(layers: int, **more: Any) -> Config:
    """A config with multi-head latent attention."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "torch_dtype": "bfloat16",
        **more,
    }


LLAMA_3_8B = gqa(32, 32, 8, 128)
QWEN3_32B = gqa(64, 64, 8, 128, hidden_size=5120)
QWEN3_30B_A3B = gqa(48, 32, 4, 128, hidden_size=2048)
SMOLLM2 = gqa(30, 9, 3, 64)
GPT_OSS_120B = gqa(
    36,
    64,
    8,
    64,
    hidden_size=2880,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 18,
)
DEEPSEEK_V3 = mla(61, num_nextn_predict_layers=1)
DEEPSEEK_V32 = {**DEEPSEEK_V3, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
GLM_52 = {
    **mla(78, num_nextn_predict_layers=1),
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
}
GLM_52_INDEXED = (0, 1, 2, *range(6, 78, 4))
QWEN3_NEXT = gqa(
    48,
    16,
    2,
    256,
    hidden_size=2048,
    full_attention_interval=4,
    linear_num_key_heads=16,
    linear_key_head_dim=128,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)
_MIMO_PATTERN = [int(i != 0 and (i + 1) % 6 != 0) for i in range(48)]
MIMO_V2 = gqa(
    48,
    64,
    4,
    192,
    hidden_size=4096,
    v_head_dim=128,
    swa_num_key_value_heads=8,
    swa_head_dim=192,
    swa_v_head_dim=128,
    sliding_window=128,
    hybrid_layer_pattern=_MIMO_PATTERN,
)
GEMMA_4: Config = {
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "vision_config": {"num_hidden_layers": 27},
    "text_config": gqa(
        12,
        8,
        4,
        256,
        global_head_dim=512,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        sliding_window=1024,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2,
        torch_dtype=None,
    ),
}


def sizes(geometry: Geometry) -> dict[str, tuple[int, int]]:
    """Layers and element size of each plane, in the order of the planes."""
    return {plane.name: (plane.num_layers, plane.element_size) for plane in geometry.planes}


def per_tp(config: Mapping[str, Any], kv_dtype: str, plane: str) -> list[int]:
    """The element size of one plane at TP 1, 2, 4 and 8, after a look at every rank."""
    found = []
    for tp in TPS:
        ranks = [
            geometry_from_hf_config(config, tp=tp, tp_rank=rank, kv_dtype=kv_dtype)
            for rank in range(tp)
        ]
        assert len({geometry.fingerprint for geometry in ranks}) == 1
        found.append(ranks[0].plane(plane).element_size)
    return found


@pytest.mark.parametrize(
    ("config", "kv_dtype", "plane", "expected"),
    [
        (LLAMA_3_8B, "auto", "k", [2048, 1024, 512, 256]),
        (LLAMA_3_8B, "bf16", "v", [2048, 1024, 512, 256]),
        (LLAMA_3_8B, "fp8", "k", [1024, 512, 256, 128]),
        (LLAMA_3_8B, "fp32", "k", [4096, 2048, 1024, 512]),
        (QWEN3_30B_A3B, "auto", "v", [1024, 512, 256, 256]),
        (QWEN3_NEXT, "auto", "k", [1024, 512, 512, 512]),
        (GPT_OSS_120B, "auto", "k", [1024, 512, 256, 128]),
        (GPT_OSS_120B, "fp8_e4m3", "k_window", [512, 256, 128, 64]),
        (gqa(4, 8, 8, 80), "auto", "k", [1280, 640, 320, 160]),
        (gqa(4, 8, 8, 96), "auto", "v", [1536, 768, 384, 192]),
        (DEEPSEEK_V3, "auto", "latent", [1152] * 4),
        (DEEPSEEK_V3, "fp8_e4m3", "latent", [576] * 4),
        (DEEPSEEK_V3, "nvfp4", "latent", [288] * 4),
        (DEEPSEEK_V32, "fp8_e4m3", "latent", [656] * 4),
        (DEEPSEEK_V32, "fp8_per_tensor", "latent", [576] * 4),
        (DEEPSEEK_V32, "auto", "latent", [1152] * 4),
        (DEEPSEEK_V32, "auto", "index_key", [132] * 4),
        (DEEPSEEK_V32, "fp8_e4m3", "index_key", [132] * 4),
        (LLAMA_3_8B, "nvfp4", "k", [512, 256, 128, 64]),
        (LLAMA_3_8B, "nvfp4", "k_scale", [64, 32, 16, 8]),
        (LLAMA_3_8B, "mxfp8", "v", [1024, 512, 256, 128]),
        (LLAMA_3_8B, "mxfp8", "v_scale", [32, 16, 8, 4]),
        (QWEN3_NEXT, "fp8_e4m3", "conv_state", [49152, 24576, 12288, 6144]),
        (QWEN3_NEXT, "fp8_e4m3", "recurrent_state", [2097152, 1048576, 524288, 262144]),
        (MIMO_V2, "auto", "k", [1536, 768, 384, 384]),
        (MIMO_V2, "auto", "v", [1024, 512, 256, 256]),
        (MIMO_V2, "auto", "k_window", [3072, 1536, 768, 384]),
        (GEMMA_4, "auto", "k", [2048, 1024, 1024, 1024]),
        (GEMMA_4, "auto", "k_window", [2048, 1024, 512, 512]),
    ],
)
def test_element_sizes_of_real_models(
    config: Config, kv_dtype: str, plane: str, expected: list[int]
) -> None:
    """Element sizes are exact at TP 1, 2, 4 and 8, and the same on every rank."""
    assert per_tp(config, kv_dtype, plane) == expected


@pytest.mark.parametrize(
    ("config", "kv_dtype", "expected"),
    [
        (DEEPSEEK_V3, None, 70272),
        (DEEPSEEK_V3, "fp8_e4m3", 35136),
        (DEEPSEEK_V32, "fp8_e4m3", 48068),
        (GLM_52, "fp8_e4m3", 53940),
        (LLAMA_3_8B, None, 131072),
        (QWEN3_32B, None, 262144),
        (GPT_OSS_120B, None, 73728),
        (SMOLLM2, None, 30 * 2 * 384),
        (SMOLLM2, "fp32", 30 * 2 * 768),
    ],
)
def test_bytes_per_token_of_real_models(
    config: Config, kv_dtype: str | None, expected: int
) -> None:
    """What a token costs over all planes agrees with the published totals."""
    geometry = Geometry.from_hf_config(config, kv_dtype=kv_dtype)
    assert geometry.bytes_per_token == expected
    assert geometry.page_bytes == expected * 64


def test_indexer_layers_from_a_frequency_a_list_and_a_pattern() -> None:
    """All three spellings of who runs an indexer give the same 21 of 78 layers."""
    kinds = ["full" if layer in GLM_52_INDEXED else "shared" for layer in range(78)]
    letters = "".join("F" if kind == "full" else "S" for kind in kinds)
    by_frequency = geometry_from_hf_config(GLM_52, kv_dtype="fp8_e4m3")
    assert sizes(by_frequency) == {"latent": (78, 656), "index_key": (21, 132)}
    assert by_frequency.plane("index_key").model_layers == GLM_52_INDEXED
    bare = {name: value for name, value in GLM_52.items() if not name.startswith("index_topk_")}
    for more in (
        {"indexer_types": kinds},
        {"index_topk_pattern": letters},
        {"index_topk_pattern": list(letters)},
    ):
        assert geometry_from_hf_config({**bare, **more}, kv_dtype="fp8_e4m3") == by_frequency


def test_overrides_stand_in_for_fields() -> None:
    """`overrides` replaces fields of the language model, also nested ones, and not the input."""
    before = json.dumps(GEMMA_4)
    geometry = geometry_from_hf_config(GEMMA_4, overrides={"sliding_window": 512})
    assert geometry.plane("k_window").hit_rule == HitRule.last(512)
    assert json.dumps(GEMMA_4) == before
    every = geometry_from_hf_config(GLM_52, overrides={"index_topk_freq": 1})
    assert every.plane("index_key").num_layers == 78


def test_an_override_can_take_a_field_away() -> None:
    """None stands for a field that is not there, also where a rule would refuse it."""
    told = {**LLAMA_3_8B, "mamba_d_state": 16, "state_width": 8}
    geometry = geometry_from_hf_config(told, overrides={"mamba_d_state": None, "state_width": None})
    assert geometry == geometry_from_hf_config(LLAMA_3_8B)


def test_an_override_of_the_model_type_brings_its_defaults() -> None:
    """What a model type leaves out is filled in for the type that was put in place."""
    bare = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    geometry = geometry_from_hf_config(bare, overrides={"model_type": "gemma2"})
    assert sizes(geometry) == dict.fromkeys(("k", "v", "k_window", "v_window"), (2, 2048))


@pytest.mark.parametrize("config", [DEEPSEEK_V3, DEEPSEEK_V32])
def test_latent_rows_with_scales_by_their_own_name(config: Config) -> None:
    """fp8_ds_mla is 656 bytes a latent row, whether or not there is an indexer."""
    assert sizes(geometry_from_hf_config(config, kv_dtype="fp8_ds_mla"))["latent"] == (61, 656)


def test_window_layers_have_planes_of_their_own() -> None:
    """gpt-oss: full and window layers alternate, with equal sizes and different hit rules."""
    geometry = geometry_from_hf_config(GPT_OSS_120B)
    assert [plane.name for plane in geometry.planes] == ["k", "v", "k_window", "v_window"]
    for name in ("k", "v"):
        assert geometry.plane(name).model_layers == tuple(range(1, 36, 2))
        assert geometry.plane(name).hit_rule == HitRule()
        window = geometry.plane(f"{name}_window")
        assert window.model_layers == tuple(range(0, 36, 2))
        assert window.hit_rule == HitRule.last(128)


def test_gemma_with_two_widths_and_a_nested_config() -> None:
    """Global layers are wider, with their own head count; the dtype comes from the outer config."""
    geometry = geometry_from_hf_config(GEMMA_4)
    assert sizes(geometry) == {
        "k": (2, 2048),
        "v": (2, 2048),
        "k_window": (10, 2048),
        "v_window": (10, 2048),
    }
    text = {**GEMMA_4["text_config"], "attention_k_eq_v": False}
    geometry = geometry_from_hf_config({**GEMMA_4, "text_config": text})
    assert geometry.plane("k").element_size == 4 * 512 * 2


def test_layers_that_share_a_cache_own_none() -> None:
    """The last num_kv_shared_layers layers appear in no plane."""
    text = {**GEMMA_4["text_config"], "num_kv_shared_layers": 6}
    geometry = geometry_from_hf_config({"text_config": text})
    assert geometry.plane("k").model_layers == (5,)
    assert geometry.plane("k_window").model_layers == range(5)


def test_per_layer_config_tells_the_widths_of_odd_layers() -> None:
    """Layers with fields of their own get planes of their own, numbered by first layer."""
    more = {"05": {"head_dim": 512}, 11: {"head_dim": 512, "num_key_value_heads": 1}}
    text = {**GEMMA_4["text_config"], "per_layer_config": more}
    assert sizes(geometry_from_hf_config(text)) == {
        "k": (1, 4096),
        "k_2": (1, 1024),
        "v": (1, 4096),
        "v_2": (1, 1024),
        "k_window": (10, 2048),
        "v_window": (10, 2048),
    }


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"sliding_window_pattern": 3}, (0, 1, 3, 4)),
        ({"_sliding_window_pattern": 2}, (0, 2, 4)),
        ({"global_attn_every_n_layers": 6}, (0, 1, 2, 3, 4)),
        ({"sliding_window_pattern": "LLG"}, (0, 1, 3, 4)),
        ({"use_sliding_window": True, "max_window_layers": 4}, (4, 5)),
        ({"use_sliding_window": False, "sliding_window_pattern": 2}, ()),
        ({"use_sliding_window": False, "max_window_layers": 4}, ()),
        ({}, ()),
        ({"layer_types": ["chunked_attention"] * 2 + ["full_attention"] * 4}, (0, 1)),
    ],
)
def test_which_layers_have_a_window(more: Config, windows: tuple[int, ...]) -> None:
    """Every spelling of the window pattern; where none says which layers, all pages are needed."""
    geometry = geometry_from_hf_config({**gqa(6, 8, 8, 64), "sliding_window": 256, **more})
    planes = {plane.name: plane for plane in geometry.planes}
    found = tuple(planes["k_window"].model_layers) if "k_window" in planes else ()
    assert found == windows
    assert planes["k"].num_layers + len(windows) == 6


def test_fields_that_published_configs_leave_out() -> None:
    """A Gemma 3 config without heads or pattern takes its model type's; its own fields win."""
    text = {"model_type": "gemma3_text", "num_hidden_layers": 12, "hidden_size": 2560}
    bare = geometry_from_hf_config({"model_type": "gemma3", "text_config": text})
    assert sizes(bare)["k"] == (2, 2048)
    assert bare.plane("k_window").hit_rule == HitRule.last(4096)
    own = geometry_from_hf_config({**text, "num_key_value_heads": 8, "sliding_window": 1024})
    assert sizes(own)["k"] == (2, 4096)
    assert own.plane("k_window").hit_rule == HitRule.last(1024)


def test_keys_and_values_of_different_width() -> None:
    """K 192 and V 128 a head: two sizes in every kind of layer, in both spellings of the config."""
    geometry = geometry_from_hf_config(MIMO_V2)
    kinds = ["sliding_attention" if bit else "full_attention" for bit in _MIMO_PATTERN]
    respelt = {
        name: value for name, value in MIMO_V2.items() if not name.startswith(("swa_", "hybrid_"))
    }
    respelt |= {"model_type": "mimo_v2_flash", "layer_types": kinds}
    assert geometry_from_hf_config(respelt) == geometry
    assert sizes(geometry) == {
        "k": (9, 1536),
        "v": (9, 1024),
        "k_window": (39, 3072),
        "v_window": (39, 2048),
    }


def test_linear_attention_states() -> None:
    """States are one row a checkpoint, usable at the exact boundary, beside every fourth layer."""
    geometry = geometry_from_hf_config(QWEN3_NEXT)
    full = tuple(range(3, 48, 4))
    linear = tuple(layer for layer in range(48) if layer not in full)
    for name, size in (("conv_state", 49152), ("recurrent_state", 2097152)):
        plane = geometry.plane(name)
        assert (plane.element_size, plane.rows_per_page) == (size, 1)
        assert plane.hit_rule == HitRule.exact_boundary()
        assert plane.model_layers == linear
    assert geometry.plane("k").model_layers == full
    assert geometry.bytes_per_token == 12 * 2 * 1024
    assert geometry.state_bytes == 36 * (49152 + 2097152)


def test_linear_attention_told_by_lists_that_count_from_one() -> None:
    """Kimi Linear: latents where full_attn_layers says, states elsewhere."""
    lists = {
        "full_attn_layers": [4, 8],
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    }
    geometry = geometry_from_hf_config(mla(8, linear_attn_config=lists))
    assert geometry.plane("latent").model_layers == (3, 7)
    assert geometry.plane("recurrent_state").model_layers == (0, 1, 2, 4, 5, 6)
    assert geometry.plane("recurrent_state").element_size == 32 * 128 * 128 * 4
    assert geometry.plane("conv_state").element_size == 3 * 32 * 128 * 3 * 2


def test_scale_planes_stand_beside_their_payload() -> None:
    """NVFP4: payload and scale of k, then of v."""
    geometry = geometry_from_hf_config(LLAMA_3_8B, kv_dtype="nvfp4")
    assert sizes(geometry) == {
        "k": (32, 512),
        "k_scale": (32, 64),
        "v": (32, 512),
        "v_scale": (32, 64),
    }


def test_draft_layers_are_left_out_unless_asked_for() -> None:
    """A draft layer adds a layer to each plane, or planes of its own with its own indexer key."""
    assert sizes(geometry_from_hf_config(GLM_52))["latent"] == (78, 1152)
    layers = geometry_from_hf_config(GLM_52, draft_layers="layers")
    assert sizes(layers) == {"latent": (79, 1152), "index_key": (22, 132)}
    assert layers.plane("index_key").model_layers == (*GLM_52_INDEXED, 78)
    planes = geometry_from_hf_config(GLM_52, draft_layers="planes")
    assert sizes(planes) == {
        "latent": (78, 1152),
        "index_key": (21, 132),
        "draft_latent": (1, 1152),
        "draft_index_key": (1, 132),
    }
    assert planes.plane("draft_latent").model_layers == (78,)


def test_layer_types_may_go_on_to_the_draft_layers() -> None:
    """Entries of layer_types after the model's layers are the kinds of its draft layers."""
    config = gqa(
        2,
        8,
        8,
        64,
        sliding_window=128,
        num_nextn_predict_layers=1,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
    )
    assert set(sizes(geometry_from_hf_config(config))) == {"k", "v"}
    drafted = geometry_from_hf_config(config, draft_layers="planes")
    assert drafted.plane("draft_k_window").model_layers == (2,)


def test_pipeline_stages_share_out_every_layer_once() -> None:
    """Over all stages each layer of each plane appears once, under its number in the model."""
    whole = geometry_from_hf_config(GLM_52, draft_layers="layers")
    for pp in (2, 3, 5, 78):
        found: dict[str, list[int]] = {plane.name: [] for plane in whole.planes}
        for pp_rank in range(pp):
            stage = geometry_from_hf_config(GLM_52, pp=pp, pp_rank=pp_rank, draft_layers="layers")
            for plane in stage.planes:
                assert plane.element_size == whole.plane(plane.name).element_size
                found[plane.name] += plane.model_layers
        assert found == {plane.name: list(plane.model_layers) for plane in whole.planes}
    first = geometry_from_hf_config(GLM_52, pp=5, pp_rank=0)
    last = geometry_from_hf_config(GLM_52, pp=5, pp_rank=4)
    assert (first.plane("latent").num_layers, last.plane("latent").num_layers) == (16, 15)


def test_a_stage_without_a_cache_is_refused() -> None:
    """A stage whose layers all read another layer's cache has no geometry."""
    config = {**gqa(8, 8, 8, 64), "num_kv_shared_layers": 4}
    assert geometry_from_hf_config(config, pp=2, pp_rank=0).plane("k").num_layers == 4
    with pytest.raises(GeometryError, match="none of which keeps a cache"):
        geometry_from_hf_config(config, pp=2, pp_rank=1)


class _WithToDict:
    def __init__(self, told: Any) -> None:
        self._told = told

    def to_dict(self) -> Any:
        return self._told


def test_every_way_to_give_a_config(tmp_path: Path) -> None:
    """A mapping, a file, its folder, a Path and an object with to_dict() give one geometry."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    expected = geometry_from_hf_config(LLAMA_3_8B)
    for config in (str(path), path, tmp_path, str(tmp_path), _WithToDict(LLAMA_3_8B)):
        assert geometry_from_hf_config(config) == expected
    assert Geometry.from_hf_config(path, tp=2, page_size=16).page_size == 16


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ({"torch_dtype": "float16"}, 2048),
        ({"torch_dtype": None, "dtype": "float32"}, 4096),
        ({"dtype": "torch.float32"}, 4096),
        ({"torch_dtype": None}, 2048),
        ({"num_key_value_heads": None}, 8192),
        ({"head_dim": None}, 2048),
    ],
)
def test_fields_that_may_be_absent(more: Config, size: int) -> None:
    """The dtype defaults to bf16, KV heads to all heads, head_dim to hidden size over heads."""
    assert geometry_from_hf_config({**LLAMA_3_8B, **more}).plane("k").element_size == size


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads"])
def test_a_missing_field_is_named_with_a_way_on(field: str) -> None:
    """An unknown architecture's error names the missing field and how to give planes by hand."""
    config = {name: value for name, value in LLAMA_3_8B.items() if name != field}
    with pytest.raises(UnknownArchitectureError, match=field) as caught:
        geometry_from_hf_config(config)
    assert "Geometry.from_dict" in str(caught.value)
    assert "kvferry geometry planes.json" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "num_hidden_layers, num_attention_heads"),
        ({**LLAMA_3_8B, "head_dim": None, "hidden_size": None}, "head_dim"),
        (mla(4, qk_rope_head_dim=None), "qk_rope_head_dim"),
        ({**QWEN3_NEXT, "full_attention_interval": None}, "layer_types"),
        ({**QWEN3_NEXT, "linear_value_head_dim": None}, "linear_value_head_dim"),
        ({**GPT_OSS_120B, "sliding_window": None}, "sliding_window"),
        ({**GEMMA_4["text_config"], "layer_types": None}, "layer_types"),
        ({**LLAMA_3_8B, "layer_types": ["conv"] * 32}, "'conv'"),
        ({**LLAMA_3_8B, "mamba_d_state": 16}, "mamba_d_state"),
        ({**LLAMA_3_8B, "multi_query": True}, "multi_query"),
        ({**LLAMA_3_8B, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**LLAMA_3_8B, "cross_attention_layers": [3]}, "cross_attention_layers"),
        ({**LLAMA_3_8B, "compress_ratios": [4, 128]}, "compress_ratios"),
        ({**LLAMA_3_8B, "index_head_dim": 128}, "index_head_dim without kv_lora_rank"),
        ({**LLAMA_3_8B, "attn_type_list": [1, 0] * 16}, "attn_type_list"),
        (mla(4, linear_attn_config={"num_heads": 4}), "linear_attn_config.full_attn_layers"),
    ],
)
def test_configs_that_tell_too_little_are_refused(config: Config, named: str) -> None:
    """A cache the rules do not describe is refused by the field, never guessed at."""
    with pytest.raises(UnknownArchitectureError, match=named):
        geometry_from_hf_config(config)


def test_fields_that_say_no_are_no_reason_to_refuse() -> None:
    """A field of a foreign cache that is off, empty or null changes nothing."""
    off = {
        "multi_query": False,
        "is_encoder_decoder": False,
        "cross_attention_layers": [],
        "mamba_d_state": None,
        "attn_type_list": [1] * 32,
        "per_layer_config": {},
    }
    assert geometry_from_hf_config({**LLAMA_3_8B, **off}) == geometry_from_hf_config(LLAMA_3_8B)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, "32", True, 1.5, [4], 1 << 40])
def test_bad_numbers_are_named(field: str, value: Any) -> None:
    """A size that is no positive whole number is refused with its field and value."""
    with pytest.raises(GeometryError, match=field) as caught:
        geometry_from_hf_config({**LLAMA_3_8B, field: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**LLAMA_3_8B, "num_key_value_heads": 0}, "num_key_value_heads"),
        ({**LLAMA_3_8B, "num_key_value_heads": 7}, "heads 7 .* num_attention_heads 32"),
        ({**LLAMA_3_8B, "num_key_value_heads": 64}, "heads 64 .* num_attention_heads 32"),
        ({**LLAMA_3_8B, "head_dim": None, "hidden_size": 4097}, "hidden_size 4097"),
        ({**LLAMA_3_8B, "torch_dtype": "int8"}, "torch_dtype 'int8'"),
        ({**LLAMA_3_8B, "torch_dtype": "float8_e4m3fn"}, "dtype of activations"),
        ({**LLAMA_3_8B, "num_hidden_layers": 1 << 20}, "num_hidden_layers"),
        ({**LLAMA_3_8B, "layer_types": ["full_attention"] * 3}, "names 3 layers"),
        ({**LLAMA_3_8B, "layer_types": ["full_attention"] * 33}, "has 0 draft layers"),
        ({**LLAMA_3_8B, "layer_types": "full_attention"}, "layer_types must be a list"),
        ({**LLAMA_3_8B, "num_kv_shared_layers": 32}, "num_kv_shared_layers 32"),
        ({**LLAMA_3_8B, "per_layer_config": [1]}, "per_layer_config"),
        ({**LLAMA_3_8B, "per_layer_config": {"x": {}}}, "per_layer_config"),
        ({**MIMO_V2, "hybrid_layer_pattern": [2] * 48}, "hybrid_layer_pattern"),
        ({**GPT_OSS_120B, "sliding_window": -1}, "sliding_window"),
        ({**LLAMA_3_8B, "sliding_window": 8, "use_sliding_window": 1}, "use_sliding_window"),
        ({**LLAMA_3_8B, "sliding_window": 8, "sliding_window_pattern": "LX"}, "letters"),
        ({**DEEPSEEK_V32, "indexer_types": ["full"] * 3}, "indexer_types"),
        ({**DEEPSEEK_V32, "indexer_types": ["some"] * 61}, "'some'"),
        ({**DEEPSEEK_V32, "index_head_dim": 100}, "index_head_dim 100"),
        ({**QWEN3_NEXT, "linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"text_config": [1]}, "nested config"),
        ([], "not list"),
        (_WithToDict([]), "JSON object"),
        (None, "not NoneType"),
        (7, "not int"),
    ],
)
def test_bad_configs_are_named(config: Any, named: str) -> None:
    """Values that cannot be are refused before a plane is made, with the field in the message."""
    with pytest.raises(GeometryError, match=named):
        geometry_from_hf_config(config)


_ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
_EVERY_FIELD = sorted(
    {
        *("per_layer_config", "linear_attn_config", "model_type", "text_config", "mtp_layer_types"),
        *(*GLM_52, *QWEN3_NEXT, *MIMO_V2, *GPT_OSS_120B, *GEMMA_4["text_config"]),
    }
)


@given(
    config=st.sampled_from([LLAMA_3_8B, GPT_OSS_120B, GLM_52, QWEN3_NEXT, MIMO_V2, GEMMA_4]),
    more=st.dictionaries(st.sampled_from(_EVERY_FIELD), _ANY_JSON, min_size=1, max_size=3),
)
def test_no_value_escapes_the_error_tree(config: Config, more: Config) -> None:
    """Whatever JSON stands in a field, the answer is a geometry or a GeometryError."""
    try:
        geometry = geometry_from_hf_config({**config, **more})
    except GeometryError:
        return
    assert geometry.page_bytes + geometry.state_bytes > 0


@pytest.mark.parametrize(
    ("config", "kwargs", "named"),
    [
        (LLAMA_3_8B, {"tp": 3}, "num_key_value_heads 8 .* tp=3"),
        (LLAMA_3_8B, {"tp": 12}, "tp=12"),
        (LLAMA_3_8B, {"tp": 0}, "tp must"),
        (LLAMA_3_8B, {"tp": True}, "tp must"),
        (LLAMA_3_8B, {"tp": "2"}, "tp must"),
        (LLAMA_3_8B, {"tp": 2, "tp_rank": 2}, "tp_rank"),
        (DEEPSEEK_V3, {"tp": 2, "tp_rank": -1}, "tp_rank"),
        (LLAMA_3_8B, {"pp": 33}, "pp=33"),
        (LLAMA_3_8B, {"pp": 2, "pp_rank": 2}, "pp_rank"),
        (QWEN3_NEXT, {"tp": 32}, "linear key heads 16"),
        (LLAMA_3_8B, {"page_size": 0}, "page_size"),
        (LLAMA_3_8B, {"kv_dtype": "int4"}, "'int4' is none of: auto, bf16"),
        (LLAMA_3_8B, {"kv_dtype": ""}, "none of"),
        (gqa(2, 8, 8, 24), {"kv_dtype": "nvfp4"}, "24 values"),
        (gqa(2, 1, 1, 3), {"kv_dtype": "nvfp4"}, "whole bytes"),
        (DEEPSEEK_V32, {"kv_dtype": "mxfp8"}, "sparse attention"),
        (DEEPSEEK_V32, {"kv_dtype": "fp8_e5m2"}, "sparse attention"),
        (LLAMA_3_8B, {"draft_layers": "some"}, "draft_layers"),
        (LLAMA_3_8B, {"draft_layers": "layers"}, "no draft layers"),
        (DEEPSEEK_V32, {"kv_dtype": "nvfp4"}, "sparse attention"),
        (LLAMA_3_8B, {"kv_dtype": "fp8_ds_mla"}, "fp8_ds_mla .* choose fp8_e4m3"),
        (LLAMA_3_8B, {"overrides": [1]}, "overrides"),
        (LLAMA_3_8B, {"overrides": {"num_kv_head": 4}}, "'num_kv_head' .* num_kv_heads"),
        (LLAMA_3_8B, {"overrides": {"kv_heads": 4}}, "'kv_heads' .* putting 4 there"),
        (LLAMA_3_8B, {"overrides": {"hidden_size": 1}}, "'hidden_size' of this model"),
        (DEEPSEEK_V3, {"overrides": {"head_dim": 64}}, "nothing reads .* 'head_dim'"),
        (LLAMA_3_8B, {"kv_dtype": "fp8", "overrides": {"torch_dtype": "float16"}}, "'torch_dtype'"),
        (LLAMA_3_8B, {"overrides": {"ssm_cfg": {"d_state": 16}}}, "ssm_cfg"),
    ],
)
def test_bad_arguments_are_named(config: Config, kwargs: Config, named: str) -> None:
    """Ranks, dtypes and options that do not fit the model are refused with their numbers."""
    with pytest.raises(GeometryError, match=named):
        geometry_from_hf_config(config, **kwargs)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "cannot read"),
        (b"{", "not a JSON file"),
        (b"\xff\xfe\x00", "not a JSON file"),
        (b"[1, 2]", "JSON object"),
        (b"[" * 100_000, "not a JSON file"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", "not a JSON file"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes | None, named: str) -> None:
    """A file that is missing, torn, of another kind or hostile is a GeometryError."""
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(GeometryError, match=named):
        geometry_from_hf_config(path)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    """A folder is read for its config.json, and the error names that file."""
    with pytest.raises(GeometryError, match=r"config\.json"):
        geometry_from_hf_config(tmp_path)


def test_reading_a_config_needs_no_framework(tmp_path: Path) -> None:
    """A geometry from a file imports neither torch nor numpy nor transformers."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM_52))
    script = (
        "import sys\n"
        "from kvferry.geometry.models import geometry_from_hf_config\n"
        f"geometry_from_hf_config({str(path)!r})\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout == "[]\n"

"""What configs tell layer by layer: indexers, widths in lists, and forms that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.errors import GeometryError, UnknownArchitectureError
from kvferry.geometry import Geometry, HitRule
from kvferry.geometry.models import geometry_from_hf_config, read_hf_config

Config = dict[str, Any]

_PLAIN: Config = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
_LATENT: Config = {
    **_PLAIN,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_SPARSE: Config = {**_LATENT, "index_head_dim": 128}
_RAW_INDEXER: Config = {**_PLAIN, "indexer_head_dim": 96, "indexer_kv_heads": 1}
_FULL, _INDEXED, _WINDOW = "full_attention", "indexed_attention", "sliding_attention"
_WINDOW_LATENTS: Config = {"sliding_window": 512, "swa_kv_lora_rank": 1024}


def _layers(geometry: Geometry, plane: str) -> tuple[int, ...]:
    return tuple(geometry.plane(plane).model_layers)


def _sizes(geometry: Geometry) -> dict[str, tuple[int, int]]:
    return {plane.name: (plane.num_layers, plane.element_size) for plane in geometry.planes}


@pytest.mark.parametrize(
    ("kinds", "indexed"),
    [
        ([_INDEXED, _WINDOW, _INDEXED, _WINDOW], (0, 2)),
        ([_INDEXED, _FULL, _FULL, _INDEXED], (0, 3)),
        (["deepseek_sparse_attention", _FULL, _FULL, _FULL], (0,)),
        ([_FULL] * 4, (0, 1, 2, 3)),
        ([_FULL, _WINDOW, _WINDOW, _FULL], (0, 3)),
        (None, (0, 1, 2, 3)),
    ],
)
def test_only_layers_with_an_indexer_keep_its_key(
    kinds: list[str] | None, indexed: tuple[int, ...]
) -> None:
    """Where layers are named as indexed, these alone; else all that keep every token."""
    config = {**_SPARSE, **_WINDOW_LATENTS, "layer_types": kinds}
    if kinds is None:
        config["sliding_window"] = None
    assert _layers(geometry_from_hf_config(config), "index_key") == indexed


def test_a_layer_without_an_indexer_keeps_plain_latent_rows() -> None:
    """Rows with their own scales are for what an indexer reads; a window beside it has none."""
    config = {**_SPARSE, **_WINDOW_LATENTS, "layer_types": [_INDEXED, _FULL, _WINDOW, _INDEXED]}
    geometry = geometry_from_hf_config(config, kv_dtype="fp8_e4m3")
    assert _sizes(geometry) == {
        "latent": (2, 656),
        "latent_2": (1, 576),
        "latent_window": (1, 1088),
        "index_key": (2, 132),
    }
    assert _layers(geometry, "latent") == (0, 3)
    assert _layers(geometry, "latent_2") == (1,)


def test_who_shares_a_pick_and_who_has_an_indexer_go_together() -> None:
    """A key is kept where a layer is indexed and does not reuse an earlier layer's pick."""
    config = {
        **_SPARSE,
        **_WINDOW_LATENTS,
        "layer_types": [_INDEXED, _WINDOW, _INDEXED, _INDEXED],
        "indexer_types": ["full", "full", "shared", "full"],
    }
    assert _layers(geometry_from_hf_config(config), "index_key") == (0, 3)


def test_sparse_attention_that_is_switched_off() -> None:
    """use_dsa false leaves plain latents, without keys and without row scales."""
    config = {**_SPARSE, "use_dsa": False}
    assert _sizes(geometry_from_hf_config(config, kv_dtype="fp8_e4m3")) == {"latent": (4, 576)}


@pytest.mark.parametrize(
    ("kinds", "indexed"),
    [
        (None, (0, 1, 2, 3)),
        ([_INDEXED, _FULL, _FULL, _INDEXED], (0, 3)),
        (["qwen_sparse_attention", _FULL, _FULL, _FULL], (0,)),
    ],
)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_raw_indexer_keys_beside_keys_and_values(
    kinds: list[str] | None, indexed: tuple[int, ...], kv_dtype: str
) -> None:
    """Without latents an indexer keeps one head of the model's dtype, on every rank."""
    for tp in (1, 4):
        geometry = geometry_from_hf_config(
            {**_RAW_INDEXER, "layer_types": kinds}, tp=tp, kv_dtype=kv_dtype
        )
        assert _layers(geometry, "index_key") == indexed
        assert geometry.plane("index_key").element_size == 96 * 2
        assert geometry.plane("index_key").hit_rule == HitRule()
        assert geometry.plane("k").num_layers == 4


def test_widths_of_latents_in_a_window() -> None:
    """Window layers have latents of their own width, and rope of their own or what heads leave."""
    kinds = [_FULL, _WINDOW, _WINDOW, _WINDOW]
    config = {**_LATENT, **_WINDOW_LATENTS, "layer_types": kinds}
    assert geometry_from_hf_config(config).plane("latent_window").element_size == (1024 + 64) * 2
    own = {**config, "swa_qk_rope_head_dim": 32}
    assert geometry_from_hf_config(own).plane("latent_window").element_size == (1024 + 32) * 2
    left = {**config, "swa_head_dim": 256, "swa_qk_nope_head_dim": 240}
    assert geometry_from_hf_config(left).plane("latent_window").element_size == (1024 + 16) * 2
    known = {
        **_LATENT,
        "sliding_window": 512,
        "layer_types": kinds,
        "model_type": "dots3_note_text",
    }
    assert geometry_from_hf_config(known).plane("latent_window").element_size == (1024 + 64) * 2
    untold = read_hf_config({**config, "swa_kv_lora_rank": None})
    assert untold.geometry.plane("latent_window").element_size == (512 + 64) * 2
    assert any("swa_kv_lora_rank" in assumed for assumed in untold.assumed)
    by_layer = {
        **_LATENT,
        "sliding_window": 512,
        "layer_types": kinds,
        "per_layer_config": {str(i): {"kv_lora_rank": 256} for i in (1, 2, 3)},
    }
    assert geometry_from_hf_config(by_layer).plane("latent_window").element_size == (256 + 64) * 2


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**_PLAIN, "layer_types": [_INDEXED] * 4}, "index_head_dim or indexer_head_dim"),
        ({**_LATENT, "layer_types": [_FULL, _FULL, _FULL, _INDEXED]}, "layer 3 is indexed"),
        ({**_PLAIN, "layer_types": ["qwen_sparse_attention"] * 4}, "indexer_head_dim"),
        ({**_RAW_INDEXER, "indexer_kv_heads": None}, "indexer_kv_heads"),
        ({**_RAW_INDEXER, "indexer_kv_heads": 2}, "indexer_kv_heads is 2"),
        ({**_LATENT, "indexer_head_dim": 96, "indexer_kv_heads": 1}, "beside kv_lora_rank"),
        ({**_SPARSE, "indexer_head_dim": 96, "indexer_kv_heads": 1}, "beside kv_lora_rank"),
        ({**_PLAIN, "index_head_dim": 128}, "index_head_dim without kv_lora_rank"),
        ({**_PLAIN, "ple_layer_ids": [1, 3]}, "ple_layer_ids"),
        ({**_PLAIN, "number_of_conv_states": 3}, "number_of_conv_states"),
        ({**_PLAIN, "mb_per_layer": 2}, "mb_per_layer"),
    ],
)
def test_caches_beside_the_known_ones_are_refused(config: Config, named: str) -> None:
    """An indexer or a state of unknown form is refused by its field, never left out."""
    with pytest.raises(UnknownArchitectureError, match=named):
        geometry_from_hf_config(config)


@pytest.mark.parametrize("entries", [["full"] * 3, ["full"] * 5, ["full"] * 9])
def test_indexer_entries_are_one_a_layer(entries: list[str]) -> None:
    """Neither too few nor entries of layers that do not exist."""
    with pytest.raises(GeometryError, match=f"it has {len(entries)} entries"):
        geometry_from_hf_config({**_SPARSE, "indexer_types": entries})
    drafted = {**_SPARSE, "indexer_types": ["full"] * 5, "num_nextn_predict_layers": 1}
    assert geometry_from_hf_config(drafted).plane("index_key").num_layers == 4


def test_heads_told_layer_by_layer() -> None:
    """A list of KV heads gives planes by their width, shared out over ranks like any other."""
    config = {**_PLAIN, "num_key_value_heads": None, "num_key_value_heads_per_layer": [4, 4, 1, 2]}
    assert _sizes(geometry_from_hf_config(config)) == {
        "k": (2, 1024),
        "k_2": (1, 256),
        "k_3": (1, 512),
        "v": (2, 1024),
        "v_2": (1, 256),
        "v_3": (1, 512),
    }
    shared = geometry_from_hf_config(config, tp=2, tp_rank=1)
    assert [plane.element_size for plane in shared.planes] == [512, 256, 256] * 2
    heads = {**_PLAIN, "num_attention_heads_per_layer": [16, 16, 8, 8], "num_key_value_heads": None}
    assert _sizes(geometry_from_hf_config(heads))["k_2"] == (2, 2048)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"num_key_value_heads_per_layer": [4, 4, 4]}, "3 entries"),
        ({"num_key_value_heads_per_layer": [4] * 5}, "5 entries"),
        ({"num_key_value_heads_per_layer": [4, 4, 4, 0]}, r"per_layer\[3\]"),
        ({"num_key_value_heads_per_layer": [4, 4, 4, None]}, r"per_layer\[3\]"),
        ({"num_key_value_heads_per_layer": 4}, "must be a list"),
        ({"num_key_value_heads_per_layer": {"0": 4}}, "must be a list"),
        ({"per_layer_config": {"4": {}}}, "entry for layer '4', but the layers are 0 to 3"),
        ({"per_layer_config": {"9" * 30: {}}}, "entry for layer"),
        ({"per_layer_config": {-1: {}}}, "layer numbers"),
    ],
)
def test_entries_of_layers_that_do_not_exist_are_errors(more: Config, named: str) -> None:
    """Every entry belongs to a layer, and every layer that should have one has it."""
    with pytest.raises(GeometryError, match=named):
        geometry_from_hf_config({**_PLAIN, **more})


@pytest.mark.parametrize(
    "field",
    [
        "head_dim_per_layer",
        "head_dims",
        "kv_heads_list",
        "v_head_dims",
        "kv_lora_ranks",
        "window_sizes",
        "sliding_windows",
        "layer_num_kv_heads",
    ],
)
def test_sizes_in_lists_that_no_rule_reads_are_refused(field: str) -> None:
    """A list with an entry a layer, of a name that speaks of sizes, is named, not passed over."""
    with pytest.raises(UnknownArchitectureError, match=rf"\b{field}\b"):
        geometry_from_hf_config({**_PLAIN, field: [1, 2, 3, 4]})


def test_lists_that_tell_no_size() -> None:
    """Lists of other things, short ones, and layers that all read their own KV change nothing."""
    harmless = {
        "no_rope_layers": [1, 1, 1, 0],
        "mlp_layer_types": ["dense"] * 4,
        "head_dims": [],
        "kv_source_layers": [0, 1, 2, 3],
        "id2label": {"0": "x"},
    }
    assert geometry_from_hf_config({**_PLAIN, **harmless}) == geometry_from_hf_config(_PLAIN)
    with pytest.raises(UnknownArchitectureError, match="kv_source_layers"):
        geometry_from_hf_config({**_PLAIN, "kv_source_layers": [0, 0, 2, 2]})


@pytest.mark.parametrize("field", ["sliding_window", "sliding_window_size", "attention_chunk_size"])
def test_windows_in_a_list_are_refused(field: str) -> None:
    """A window a layer is not the same as none."""
    with pytest.raises(UnknownArchitectureError, match=f"{field} as a list"):
        geometry_from_hf_config({**_PLAIN, field: [None, 512, None, 512]})


@pytest.mark.parametrize(
    "latents",
    [
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        {"kv_lora_rank": None, "qk_rope_head_dim": 0, "qk_nope_head_dim": 0, "v_head_dim": 0},
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 0},
        {},
    ],
)
def test_latents_that_are_switched_off(latents: Config) -> None:
    """use_mla false is plain attention, whatever widths of latents stand beside it."""
    config = {**_PLAIN, **latents, "use_mla": False}
    assert geometry_from_hf_config(config) == geometry_from_hf_config(_PLAIN)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**_PLAIN, "use_mla": False, "v_head_dim": 64}, "v_head_dim is 64, but use_mla is false"),
        ({**_PLAIN, "use_mla": "no"}, "use_mla must be true or false"),
        ({**_PLAIN, "v_head_dim": 0}, "v_head_dim"),
        ({**_SPARSE, "use_mla": False}, "index_head_dim without kv_lora_rank"),
        (
            {**_PLAIN, "head_dim": None, "qk_nope_head_dim": 128},
            "qk_nope_head_dim without head_dim",
        ),
        ({**_PLAIN, "head_dim": None, "attention_head_dim": 64}, "attention_head_dim without"),
        ({**_PLAIN, "head_dim": None, "qk_head_dim": 192}, "qk_head_dim without head_dim"),
    ],
)
def test_widths_under_other_names_are_refused(config: Config, named: str) -> None:
    """A width that is told, but not where a rule reads it, is named."""
    with pytest.raises(GeometryError, match=named):
        geometry_from_hf_config(config)


@pytest.mark.parametrize(
    ("quantised", "size"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True}}, 512),
        ({"kv_cache_quant_algo": "FP8"}, 512),
        ({"kv_cache_quant_algo": "NVFP4"}, 256),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": None, "quant_method": "fp8"}, 1024),
        ({}, 1024),
        (None, 1024),
    ],
)
def test_how_the_cache_is_quantised(quantised: Config | None, size: int) -> None:
    """auto follows what quantization_config says of the cache; a kv_dtype that is given wins."""
    for config in (
        {**_PLAIN, "quantization_config": quantised},
        {"text_config": _PLAIN, "quantization_config": quantised},
    ):
        assert geometry_from_hf_config(config).plane("k").element_size == size
        given = geometry_from_hf_config(config, kv_dtype="bf16")
        assert given.plane("k").element_size == 1024


@pytest.mark.parametrize(
    "told",
    [
        {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        {"kv_cache_scheme": {"num_bits": 4, "type": "float"}},
        {"kv_cache_scheme": "fp7"},
        {"kv_cache_quant_algo": "INT8"},
        {"kv_cache_group": ["*k_proj"]},
    ],
)
def test_a_cache_quantised_in_another_way_is_refused(told: Config) -> None:
    """What is not fp8 or nvfp4 is named, with kv_dtype= as the way on."""
    config = {**_PLAIN, "quantization_config": told}
    with pytest.raises(GeometryError, match=rf"{next(iter(told))} .* give kv_dtype="):
        geometry_from_hf_config(config)
    assert geometry_from_hf_config(config, kv_dtype="fp8").plane("k").element_size == 512


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"type_vocab_size": 2}, "type_vocab_size"),
        ({"type_vocab_size": 2, "is_decoder": False}, "type_vocab_size"),
        ({"patch_size": 16}, "patch_size, and no vocab_size"),
        ({"num_mel_bins": 128}, "num_mel_bins"),
        ({"is_causal": False}, "is_causal"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"architectures": ["ModernBertForMaskedLM"]}, "ModernBertForMaskedLM"),
    ],
)
def test_models_that_attend_to_later_tokens_are_refused(more: Config, named: str) -> None:
    """An encoder has no prefix to keep, and the field that tells is named."""
    with pytest.raises(UnknownArchitectureError, match=named):
        geometry_from_hf_config({**_PLAIN, **more})


def test_decoders_with_fields_like_an_encoder() -> None:
    """A decoder that takes images, or was made from an encoder, is read."""
    for more in (
        {"type_vocab_size": 2, "is_decoder": True},
        {"type_vocab_size": 0},
        {"patch_size": 14, "image_size": 448, "vocab_size": 151666},
        {"is_causal": True, "is_decoder": False, "use_bidirectional_attention": "vision"},
        {"architectures": ["LlamaForCausalLM"], "use_bidirectional_attention": None},
    ):
        assert geometry_from_hf_config({**_PLAIN, **more}) == geometry_from_hf_config(_PLAIN)

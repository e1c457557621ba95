"""The transformers adapter on tiny random models: grouped-query attention, and MLA as cached there.

Restored caches are compared with the same split prefilled fresh, bit for bit.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from tests.adapters.tiny_models import MLA

from kvferry.adapters.transformers import CacheShape, PrefixCarrier, cache_keyword
from kvferry.errors import (
    BudgetError,
    GeometryError,
    MissingDependencyError,
    PlanError,
    PoolClosedError,
    SlotOwnershipError,
    TransferFaultError,
    ViewError,
)
from kvferry.testing import assert_bytes_equal
from kvferry.transfer import CompletedTransfer, TransferEngine, TransferHandle, TransferPlan

_PAGE = 16
_SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def _config(kind: str) -> Any:
    if kind == "gqa":
        return transformers.LlamaConfig(**_SMALL, num_key_value_heads=2)
    return transformers.DeepseekV3Config(**_SMALL, **MLA)


@functools.cache
def _model(kind: str, dtype: torch.dtype) -> Any:
    """A random model whose outputs depend on every byte of its cache: std = 1/√fan_in."""
    torch.manual_seed(7)
    make = {"gqa": transformers.LlamaForCausalLM, "mla": transformers.DeepseekV3ForCausalLM}[kind]
    model = make(_config(kind))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                fan_in = 1 if "embed" in name else weight.shape[-1]
                weight.normal_(std=fan_in**-0.5)
    return model.eval().to(dtype)


def _prompt(tokens: int, seed: int = 1) -> torch.Tensor:
    """Shape ``[1, tokens]``."""
    return torch.randint(97, (1, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _forward(model: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    logits: torch.Tensor = model(tokens, use_cache=True, **{cache_keyword(model): cache}).logits
    return logits


def _prefill(model: Any, tokens: torch.Tensor) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    _forward(model, tokens, cache)
    return cache


def _carrier(model: Any, cache: Any, pages: int = 16, **more: Any) -> PrefixCarrier:
    slot = 1 << 16  # more than a page and its digests take in these models
    told = {"config": model.config, "model_id": "tiny", "page_size": _PAGE, **more}
    return PrefixCarrier(cache, num_bytes=pages * slot, **told)


def _assert_same_cache(found: Any, expected: Any) -> None:
    assert len(found.layers) == len(expected.layers)
    for number, (one, other) in enumerate(zip(found.layers, expected.layers, strict=True)):
        for name in ("keys", "values"):
            tensors = [getattr(layer, name) for layer in (one, other)]
            assert tensors[0].dtype == tensors[1].dtype
            one_bytes, other_bytes = (
                tensor.contiguous().view(torch.uint8).numpy() for tensor in tensors
            )
            assert_bytes_equal(one_bytes, other_bytes, what=f"layer {number} {name}")


def _poison(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))


_KINDS = pytest.mark.parametrize("kind", ["gqa", "mla"])
_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@_KINDS
@_DTYPES
@pytest.mark.parametrize("suffix", [1, 9])
def test_a_restored_prefix_computes_the_same_bits(
    kind: str, dtype: torch.dtype, suffix: int
) -> None:
    """KV bytes and the logits of every step equal those of the same split prefilled fresh."""
    model, prompt = _model(kind, dtype), _prompt(4 * _PAGE + suffix)
    prefix, rest = prompt[:, : 4 * _PAGE], prompt[:, 4 * _PAGE :]
    fresh, kept = _prefill(model, prefix), _prefill(model, prefix)
    with _carrier(model, kept) as carrier:
        stored = carrier.store(kept, prompt)
        assert stored is not None
        assert stored.num_pages == 4
        _poison(kept)
        restored = carrier.load(stored, prompt)
    assert (restored.num_tokens, restored.bad_pages) == (4 * _PAGE, ())
    _assert_same_cache(restored.cache, fresh)
    for _ in range(4):
        logits = [_forward(model, rest, cache) for cache in (restored.cache, fresh)]
        assert_bytes_equal(logits[0].float().numpy(), logits[1].float().numpy())
        rest = logits[0][:, -1:].argmax(-1)
    _assert_same_cache(restored.cache, fresh)


@_KINDS
def test_logits_depend_on_the_cache(kind: str) -> None:
    """The comparison above can fail: one changed value of a restored cache changes the logits."""
    model, prompt = _model(kind, torch.float32), _prompt(2 * _PAGE + 1)
    fresh = _prefill(model, prompt[:, :-1])
    changed = copy.deepcopy(fresh)
    changed.layers[1].keys[0, 0, 3, 5] += 1.0
    logits = [_forward(model, prompt[:, -1:], cache) for cache in (changed, fresh)]
    assert not torch.equal(*logits)
    with pytest.raises(AssertionError, match="layer 1 keys"):
        _assert_same_cache(changed, fresh)


@_KINDS
@pytest.mark.parametrize("bad_page", [0, 2])
def test_a_changed_page_ends_the_prefix(kind: str, bad_page: int) -> None:
    """A flipped bit refuses its page and all after it; computed anew, all bits are the same."""
    model, prompt = _model(kind, torch.float32), _prompt(4 * _PAGE + 3)
    boundary, prefix = bad_page * _PAGE, 4 * _PAGE
    kept = _prefill(model, prompt[:, :prefix])
    with _carrier(model, kept) as carrier:
        stored = carrier.store(kept, prompt)
        assert stored is not None
        _poison(kept)
        with memoryview(carrier.pool.slot_view(stored.slots[bad_page])) as page:
            page[1000] ^= 0x40
        restored = carrier.load(stored)
    assert (restored.num_tokens, restored.num_pages) == (boundary, 4)
    assert restored.bad_pages == (bad_page,)
    assert restored.cache.get_seq_length() == boundary
    fresh = transformers.DynamicCache(config=model.config)
    if boundary:
        _forward(model, prompt[:, :boundary], fresh)
    for start, stop in ((boundary, prefix), (prefix, prefix + 3)):
        logits = [_forward(model, prompt[:, start:stop], c) for c in (restored.cache, fresh)]
        assert_bytes_equal(logits[0].numpy(), logits[1].numpy())
    _assert_same_cache(restored.cache, fresh)


def test_generate_goes_on_from_a_restored_prefix() -> None:
    """`generate` takes the restored cache and returns what it returns for a fresh one."""
    model, prompt = _model("gqa", torch.float32), _prompt(3 * _PAGE + 5)
    fresh = _prefill(model, prompt[:, : 3 * _PAGE])
    with _carrier(model, fresh) as carrier:
        stored = carrier.store(fresh, prompt)
        assert stored is not None
        restored = carrier.load(stored, prompt)
    told: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    told["attention_mask"] = torch.ones_like(prompt)
    found, expected = (
        model.generate(prompt, **{cache_keyword(model): cache}, **told)
        for cache in (restored.cache, fresh)
    )
    assert found.shape == (1, prompt.shape[1] + 6)
    assert torch.equal(found, expected)


def test_the_planes_come_from_the_cache() -> None:
    """MLA's latent and rotary part are planes of different width, named k and v."""
    model = _model("mla", torch.bfloat16)
    planes = CacheShape.of(_prefill(model, _prompt(2))).planes
    assert [(p.name, p.num_layers, p.element_size) for p in planes] == [("k", 3, 80), ("v", 3, 16)]


def test_layers_of_two_widths_and_of_none() -> None:
    """Layers that differ in width get planes of their own; an empty layer is left out."""
    config = _config("gqa")
    cache = transformers.DynamicCache(config=config)
    widths = {0: 8, 2: 24}
    for layer, width in widths.items():
        cache.update(torch.randn(1, 2, 37, width), torch.randn(1, 2, 37, 4), layer)
    planes = CacheShape.of(cache).planes
    assert [(p.name, tuple(p.model_layers)) for p in planes] == [
        ("k0", (0,)),
        ("v0", (0,)),
        ("k1", (2,)),
        ("v1", (2,)),
    ]
    with PrefixCarrier(
        cache, config=config, model_id="two", num_bytes=1 << 20, page_size=_PAGE
    ) as carrier:
        stored = carrier.store(cache, range(37))
        assert stored is not None
        restored = carrier.load(stored)
    assert restored.num_tokens == 32
    assert restored.cache.layers[1].get_seq_length() == 0
    for layer in widths:
        found, expected = restored.cache.layers[layer], cache.layers[layer]
        assert torch.equal(found.keys, expected.keys[:, :, :32])
        assert torch.equal(found.values, expected.values[:, :, :32])


def test_only_pages_of_the_same_tokens_are_loaded() -> None:
    """A prompt gets the pages it shares, and its last token is left to compute."""
    model, prompt = _model("gqa", torch.float32), _prompt(4 * _PAGE)
    cache = _prefill(model, prompt)
    other = prompt.clone()
    other[0, 2 * _PAGE] += 1
    with _carrier(model, cache) as carrier:
        stored = carrier.store(cache, prompt)
        assert stored is not None
        assert carrier.load(stored).num_tokens == 4 * _PAGE
        assert carrier.load(stored, prompt).num_tokens == 3 * _PAGE
        assert carrier.load(stored, other).num_tokens == 2 * _PAGE
        assert carrier.load(stored, other[0].tolist()).num_tokens == 2 * _PAGE
        assert carrier.load(stored, prompt[:, 1:]).num_tokens == 0


def test_keys_tell_models_prefixes_and_tokens_apart() -> None:
    """A page's key differs with the model's id, the cache's dtype, its tokens and those before."""
    model, prompt = _model("gqa", torch.float32), _prompt(_PAGE)
    prompt = torch.cat([prompt, prompt], dim=1)
    caches = [_prefill(model, prompt), _prefill(_model("gqa", torch.bfloat16), prompt)]
    keys: list[bytes] = []
    for cache, model_id in ((caches[0], "a"), (caches[0], "b"), (caches[1], "a")):
        with _carrier(model, cache, model_id=model_id) as carrier:
            for tokens in (prompt, prompt + 1):
                stored = carrier.store(cache, tokens)
                assert stored is not None
                keys += stored.page_keys
    assert len(set(keys)) == len(keys) == 12


def test_a_prefix_shorter_than_a_page_keeps_nothing() -> None:
    """It is stored as 0 pages, loads as an empty cache, and takes no slot."""
    model, prompt = _model("gqa", torch.float32), _prompt(_PAGE - 1)
    cache = _prefill(model, prompt)
    with _carrier(model, cache) as carrier:
        free = carrier.pool.num_free
        stored = carrier.store(cache, prompt)
        assert stored is not None
        assert (stored.num_pages, stored.num_tokens, stored.moved.num_bytes) == (0, 0, 0)
        assert carrier.pool.num_free == free
        restored = carrier.load(stored)
        assert (restored.num_tokens, restored.cache.get_seq_length()) == (0, 0)
        carrier.drop(stored)


def test_tokens_beyond_the_cache_are_left_out() -> None:
    """A last token that was generated but not yet computed is no part of what is stored."""
    model, prompt = _model("gqa", torch.float32), _prompt(2 * _PAGE)
    cache = _prefill(model, prompt[:, :-1])
    with _carrier(model, cache) as carrier:
        stored = carrier.store(cache, prompt)
        assert stored is not None
        assert stored.num_pages == 1


def test_a_full_pool_is_a_value() -> None:
    """`store` returns None and takes nothing; after a drop there is room again."""
    model, prompt = _model("gqa", torch.float32), _prompt(3 * _PAGE)
    cache = _prefill(model, prompt)
    with _carrier(model, cache, pages=1) as carrier:
        room = carrier.pool.num_slots
        prefixes = [carrier.store(cache, _prompt(3 * _PAGE, n)) for n in range(room // 3)]
        left = carrier.pool.num_free
        assert left < 3
        assert carrier.store(cache, prompt) is None
        assert carrier.pool.num_free == left
        first = prefixes[0]
        assert first is not None
        carrier.drop(first)
        assert carrier.store(cache, prompt) is not None
        carrier.pool.check_integrity()


def test_a_failed_store_gives_its_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the copy fails nothing is kept and no slot is lost."""
    model, prompt = _model("gqa", torch.float32), _prompt(3 * _PAGE)
    cache = _prefill(model, prompt)
    failing = TransferFaultError("the copy broke")

    def fail(engine: TransferEngine, plan: TransferPlan) -> TransferHandle:
        return CompletedTransfer(plan, engine.path, engine.verify, fault=failing)

    monkeypatch.setattr(TransferEngine, "store", fail)
    with _carrier(model, cache) as carrier:
        free = carrier.pool.num_free
        with pytest.raises(TransferFaultError, match="broke"):
            carrier.store(cache, prompt)
        assert carrier.pool.num_free == free
        carrier.pool.check_integrity()


def test_a_dropped_prefix_is_gone() -> None:
    """Dropping twice, and loading what was dropped, are errors even after the slots are reused."""
    model, prompt = _model("gqa", torch.float32), _prompt(2 * _PAGE)
    cache = _prefill(model, prompt)
    with _carrier(model, cache) as carrier:
        stored = carrier.store(cache, prompt)
        assert stored is not None
        carrier.drop(stored)
        again = carrier.store(cache, prompt)
        assert again is not None
        with pytest.raises(SlotOwnershipError, match="2 pages"):
            carrier.drop(stored)
        with pytest.raises(SlotOwnershipError, match="dropped"):
            carrier.load(stored)
        assert carrier.load(again).num_tokens == 2 * _PAGE
    with pytest.raises(PoolClosedError):
        carrier.store(cache, prompt)


def test_what_was_moved_is_told() -> None:
    """Bytes are those of the pages, without padding; the path is the engine's."""
    model, prompt = _model("gqa", torch.float32), _prompt(3 * _PAGE)
    cache = _prefill(model, prompt)
    with _carrier(model, cache) as carrier:
        stored = carrier.store(cache, prompt)
        assert stored is not None
        moved = (stored.moved, carrier.load(stored).moved)
    assert {one.num_bytes for one in moved} == {3 * _PAGE * 3 * 2 * (2 * 16 * 4)}
    assert all(one.path.startswith("cpu") and one.seconds > 0 for one in moved)


def test_a_batch_is_refused() -> None:
    """A cache of two sequences is refused with its layer, class and size."""
    model = _model("gqa", torch.float32)
    cache = _prefill(model, _prompt(4).expand(2, 4))
    with pytest.raises(ViewError, match=r"layer 0 \(DynamicLayer\) holds a batch of 2"):
        _carrier(model, cache)


def test_an_empty_cache_is_refused() -> None:
    """A cache that tells no widths cannot make a carrier."""
    model = _model("gqa", torch.float32)
    with pytest.raises(ViewError, match="empty in all of its 3 layers"):
        _carrier(model, transformers.DynamicCache(config=model.config))


def test_a_cache_of_another_model_is_refused() -> None:
    """Its layers that differ are named, and nothing is stored."""
    model, prompt = _model("gqa", torch.float32), _prompt(_PAGE)
    cache, other = _prefill(model, prompt), _prefill(_model("gqa", torch.bfloat16), prompt)
    with _carrier(model, cache) as carrier:
        free = carrier.pool.num_free
        with pytest.raises(ViewError, match="layers 0, 1, 2"):
            carrier.store(other, prompt)
        assert carrier.pool.num_free == free


def test_a_sliding_window_is_refused() -> None:
    """The error names the layer and its class, before memory is taken."""
    told = {**_SMALL, "num_key_value_heads": 2, "sliding_window": 8}
    config = transformers.MistralConfig(**told)
    cache = transformers.DynamicCache(config=config)
    cache.update(torch.randn(1, 2, 4, 16), torch.randn(1, 2, 4, 16), 0)
    with pytest.raises(GeometryError, match="layer 0 of the cache is a DynamicSlidingWindowLayer"):
        PrefixCarrier(cache, config=config, model_id="m", num_bytes=1 << 20)
    plain = _prefill(_model("gqa", torch.float32), _prompt(4))
    with pytest.raises(GeometryError, match="DynamicSlidingWindowLayer"):
        PrefixCarrier(plain, config=config, model_id="m", num_bytes=1 << 20)


def test_a_config_of_another_depth_is_refused() -> None:
    """A config that makes another number of layers than the cache has is no match."""
    cache = _prefill(_model("gqa", torch.float32), _prompt(4))
    config = transformers.LlamaConfig(**{**_SMALL, "num_hidden_layers": 5})
    with pytest.raises(GeometryError, match="3 layers, but this config makes 5"):
        PrefixCarrier(cache, config=config, model_id="m", num_bytes=1 << 20)


@pytest.mark.parametrize("cache", [None, (), {"layers": []}])
def test_something_else_than_a_cache_is_refused(cache: Any) -> None:
    """The error names what was passed."""
    with pytest.raises(GeometryError, match=type(cache).__name__):
        _carrier(_model("gqa", torch.float32), cache)


@pytest.mark.parametrize("tokens", [[0.5], [[1], [2]], "abc", np.zeros((2, 2), np.int64), 3])
def test_bad_tokens_are_refused(tokens: Any) -> None:
    """Token ids are the whole numbers of one sequence, or an error before anything is stored."""
    model = _model("gqa", torch.float32)
    cache = _prefill(model, _prompt(_PAGE))
    with _carrier(model, cache) as carrier, pytest.raises(PlanError, match="token_ids"):
        carrier.store(cache, tokens)


def test_a_pool_beyond_memory_is_refused() -> None:
    """The budget is checked when the carrier is made."""
    model = _model("gqa", torch.float32)
    with pytest.raises(BudgetError, match="asked for"):
        _carrier(model, _prefill(model, _prompt(2)), pages=1 << 40)


@pytest.mark.parametrize("absent", ["torch", "transformers.cache_utils"])
def test_an_absent_library_gives_the_install_line(
    absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch or transformers the error has the command that installs them."""
    model = _model("gqa", torch.float32)
    cache = _prefill(model, _prompt(2))
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'torch>="):
        CacheShape.of(cache)

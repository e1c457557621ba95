"""`PrefixCache` around `generate`: bits equal those of the same split, computed anew.

Models of each kind of cache; on a GPU where there is one.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from tests.adapters.tiny_models import (
    KINDS,
    PAGE,
    WITH_STATES,
    assert_equal_caches,
    assert_equal_tensors,
    cache_tensors,
    forward,
    model_of,
    new_cache,
    prefilled,
    tokens,
)

from kvferry.adapters.transformers import Kept, PrefixCache, cache_keyword
from kvferry.errors import ConfigError, GeometryError, PlanError, ViewError
from kvferry.testing import flip_host_bit
from kvferry.types import SlotKind

_KINDS = pytest.mark.parametrize("kind", KINDS)
_WITH_STATES = pytest.mark.parametrize("kind", WITH_STATES)
_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def _prefixes(model: Any, **told: Any) -> PrefixCache:
    told = {"page_size": PAGE, "max_tokens": 256, "host": {"num_bytes": "64MiB"}, **told}
    return PrefixCache(model, "tiny", **told)


def _assert_goes_on_alike(model: Any, found: Any, expected: Any, rest: torch.Tensor) -> None:
    """The logits of `rest` and of four steps behind it, and what the caches then hold."""
    assert_equal_caches(found, expected)
    for step in range(5):
        logits = [forward(model, rest, cache) for cache in (found, expected)]
        assert_equal_tensors(logits[0], logits[1], f"logits of step {step}")
        rest = logits[0][:, -1:].argmax(-1)
    assert_equal_caches(found, expected)


@_KINDS
@_DTYPES
@pytest.mark.parametrize("suffix", [1, 7])
def test_a_restored_prompt_goes_on_with_the_same_bits(
    kind: str, dtype: torch.dtype, suffix: int
) -> None:
    """Cache and logits are those of the same split, computed anew."""
    model, prompt = model_of(kind, dtype), tokens(4 * PAGE + suffix)
    with _prefixes(model) as prefixes:
        prefixes.generate(prompt, max_new_tokens=3, do_sample=False)
        cache, num_cached = prefixes.restore(prompt)
    assert num_cached == 4 * PAGE
    fresh = prefilled(model, prompt[:, : 4 * PAGE])
    _assert_goes_on_alike(model, cache, fresh, prompt[:, 4 * PAGE :])


@_KINDS
def test_the_comparison_sees_one_wrong_bit(kind: str) -> None:
    """A restored cache of which any one tensor has a changed value computes other logits."""
    model, prompt = model_of(kind), tokens(4 * PAGE + 1)
    with _prefixes(model) as prefixes:
        prefixes.prefill(prompt)
        cache, _ = prefixes.restore(prompt)
    fresh = prefilled(model, prompt[:, :-1])
    expected = forward(model, prompt[:, -1:], copy.deepcopy(fresh))
    for name in cache_tensors(cache):
        changed = copy.deepcopy(cache)
        spoiled = cache_tensors(changed)[name]
        spoiled[..., -1] += 1.0
        with pytest.raises(AssertionError, match=name):
            assert_equal_caches(changed, fresh)
        assert not torch.equal(forward(model, prompt[:, -1:], changed), expected), name


@_KINDS
def test_generate_answers_the_same_with_and_without_a_prefix(kind: str) -> None:
    """Tokens and scores of a repeated prompt, and those of the same split by hand."""
    model, prompt = model_of(kind), tokens(5 * PAGE + 3)
    told: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    fresh = prefilled(model, prompt[:, : 5 * PAGE])
    mask = torch.ones_like(prompt)
    expected = model.generate(prompt, attention_mask=mask, **{cache_keyword(model): fresh}, **told)
    with _prefixes(model) as prefixes:
        for cached in (0, 5 * PAGE):
            assert prefixes.restore(prompt).num_tokens == cached
            found = prefixes.generate(prompt, **told)
            assert torch.equal(found.sequences, expected.sequences)
            for one, other in zip(found.logits, expected.logits, strict=True):
                assert_equal_tensors(one, other, f"logits with {cached} tokens cached")


@_KINDS
def test_a_chat_grows(kind: str) -> None:
    """Each turn begins where the turn before ended, with the bits of a run that lost nothing."""
    model, chat = model_of(kind), tokens(2 * PAGE + 5)
    with _prefixes(model) as prefixes:
        kept = None  # the cache of a run from which nothing is taken
        for turn in range(4):
            before = prefixes.restore(chat)
            if kept is not None:
                assert before.num_tokens == kept.get_seq_length() > 0
                assert_equal_caches(before.cache, kept)
            boundary = (chat.shape[1] - 1) // PAGE * PAGE
            kept = copy.deepcopy(before.cache) if kept is None else kept
            if kept.get_seq_length() < boundary:
                forward(model, chat[:, kept.get_seq_length() : boundary], kept)
            going = copy.deepcopy(kept)
            answer = prefixes.generate(chat, max_new_tokens=PAGE + 2, do_sample=False)
            expected = model.generate(
                chat,
                attention_mask=torch.ones_like(chat),
                max_new_tokens=PAGE + 2,
                do_sample=False,
                **{cache_keyword(model): going},
            )
            assert torch.equal(answer, expected)
            if kind not in WITH_STATES:  # these also find what was generated
                kept = going
                kept.crop(-(going.get_seq_length() % PAGE))
            chat = torch.cat([answer, tokens(5, seed=turn)], dim=1)


@_KINDS
def test_a_second_prompt_takes_what_it_shares(kind: str) -> None:
    """A system prompt that was prefilled is found by every prompt that begins with it."""
    model, system = model_of(kind), tokens(3 * PAGE + 4)
    fresh = prefilled(model, system[:, : 3 * PAGE])
    with _prefixes(model) as prefixes:
        assert prefixes.prefill(system).num_tokens == 3 * PAGE
        for seed in (2, 3):
            prompt = torch.cat([system, tokens(2 * PAGE, seed)], dim=1)
            cache, num_cached = prefixes.restore(prompt)
            assert num_cached == 3 * PAGE
            assert_equal_caches(cache, fresh)
            prefixes.generate(prompt, max_new_tokens=2, do_sample=False)
        other = system.clone()
        other[0, 0] = other[0, 0] % 50 + 2 if other[0, 0] != 60 else 1
        assert not torch.equal(other, system)
        assert prefixes.restore(other).num_tokens == 0


@_KINDS
@pytest.mark.parametrize("bad_page", [0, 2])
def test_a_changed_page_is_computed_again(kind: str, bad_page: int) -> None:
    """A flipped bit on the host never gets into a cache, and the answer is the same."""
    model, prompt = model_of(kind), tokens(4 * PAGE + 3)
    with _prefixes(model) as prefixes:
        expected = prefixes.generate(prompt, max_new_tokens=4, do_sample=False)
        # A shorter prompt is computed with other bits on a GPU: what is compared is what was kept.
        kept, _ = prefixes.restore(prompt)
        keys = prefixes.ferry.keys(prompt[0].tolist())
        if kind == "window":  # it has no rows of tokens, and nothing to keep in a page
            flip_host_bit(prefixes.ferry, keys[3], kind=SlotKind.STATE)
        else:
            flip_host_bit(prefixes.ferry, keys[bad_page])
        cache, num_cached = prefixes.restore(prompt)
        assert num_cached == (0 if kind in WITH_STATES else bad_page * PAGE)
        if num_cached:
            kept.crop(num_cached - 4 * PAGE)
            assert_equal_caches(cache, kept)
        found = prefixes.generate(prompt, max_new_tokens=4, do_sample=False)
        assert torch.equal(found, expected)
        assert prefixes.restore(prompt).num_tokens == 4 * PAGE


def test_another_process_finds_it_in_storage(tmp_path: Path) -> None:
    """What one cache wrote, a later one with the same folder restores; other weights' names do not.

    A stand-in for a second process: nothing but the folder is shared.
    """
    model, prompt = model_of("linear"), tokens(4 * PAGE + 2)
    storage = {"enabled": True, "backend": "file", "path": str(tmp_path)}
    told: dict[str, Any] = {"storage": storage, "prefetch": {"threshold_tokens": PAGE}}
    with _prefixes(model, **told) as prefixes:
        prefixes.prefill(prompt)
        assert prefixes.ferry.flush().complete
    with _prefixes(model, **told) as prefixes:
        cache, num_cached = prefixes.restore(prompt)
    assert num_cached == 4 * PAGE
    assert_equal_caches(cache, prefilled(model, prompt[:, : 4 * PAGE]))
    with PrefixCache(
        model, "other", page_size=PAGE, max_tokens=256, host={"num_bytes": "64MiB"}, **told
    ) as prefixes:
        assert prefixes.restore(prompt).num_tokens == 0


@_WITH_STATES
def test_no_state_is_kept_from_between_pages(kind: str) -> None:
    """Where the model did not stop at a whole page there is nothing to go on from."""
    model, prompt = model_of(kind), tokens(3 * PAGE + 1)
    with _prefixes(model) as prefixes:
        assert prefixes.keep(prompt, prefilled(model, prompt)) == Kept((0,), 0, ("",))
        whole = prefilled(model, prompt[:, :-1])
        assert prefixes.keep(prompt, whole) == Kept(
            (3 * PAGE,), 1 if kind == "window" else 4, ("",)
        )
        assert prefixes.restore(prompt).num_tokens == 3 * PAGE


@pytest.mark.parametrize("kind", ["gqa", "linear"])
def test_a_prompt_longer_than_the_buffer(kind: str) -> None:
    """Only its beginning is kept, and a state behind it is not; the answer is the same."""
    model, prompt = model_of(kind), tokens(6 * PAGE + 1)
    with _prefixes(model, max_tokens=3 * PAGE + 1) as prefixes:
        answers = [prefixes.generate(prompt, max_new_tokens=4, do_sample=False) for _ in range(2)]
        assert prefixes.restore(prompt).num_tokens == (3 * PAGE if kind == "gqa" else 0)
    assert torch.equal(*answers)


def test_salts_are_apart() -> None:
    """A user does not find what another computed, and finds what is his."""
    model, prompt = model_of("gqa"), tokens(2 * PAGE + 1)
    with _prefixes(model) as prefixes:
        prefixes.generate(prompt, salt="anna", max_new_tokens=1)
        assert prefixes.restore(prompt, salt="ben").num_tokens == 0
        assert prefixes.restore(prompt).num_tokens == 0
        assert prefixes.restore(prompt, salt="anna").num_tokens == 2 * PAGE


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_return_sequences": 3}, "num_return_sequences=3"),
        ({"use_cache": False}, "use_cache=False"),
        ({"inputs_embeds": torch.zeros(1, 3, 64)}, "tensor inputs_embeds"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"cache": object()}, "got cache"),
        ({"assistant_model": object()}, "assistant=PrefixCache"),
        ({"generation_config": transformers.GenerationConfig(num_beams=4)}, "num_beams=4"),
    ],
)
def test_what_generate_is_not_given(told: dict[str, Any], message: str) -> None:
    """Arguments under which pages would be wrong are refused before anything is computed."""
    with _prefixes(model_of("gqa")) as prefixes:
        with pytest.raises(PlanError, match=message):
            prefixes.generate(tokens(3), **told)
        assert prefixes.restore(tokens(2 * PAGE)).num_tokens == 0


def test_models_that_are_not_served() -> None:
    """Training mode, an unnamed adapter, and a cache of another model are refused."""
    model = copy.deepcopy(model_of("gqa"))
    with pytest.raises(ConfigError, match=r"model\.eval"):
        _prefixes(model.train())
    model.eval()
    others = prefilled(model_of("gqa", torch.bfloat16), tokens(PAGE))
    with _prefixes(model) as prefixes:
        with pytest.raises(ViewError, match="layers \\[0, 1, 2, 3\\]"):
            prefixes.keep(tokens(PAGE), others)
        with pytest.raises(ViewError, match="empty"):
            prefixes.keep(tokens(PAGE), new_cache(model))
        model.peft_config = {}
        with pytest.raises(ConfigError, match="lora="):
            prefixes.restore(tokens(PAGE))
    with _prefixes(model, lora="mine") as prefixes:
        prefixes.prefill(tokens(PAGE))
    with pytest.raises(ConfigError, match="max_tokens 15"):
        _prefixes(model_of("gqa"), max_tokens=15)


def test_caches_that_are_not_served() -> None:
    """A static cache, and layers that keep something else, are named."""
    model = model_of("gqa")
    with _prefixes(model) as prefixes:
        static = transformers.StaticCache(config=model.config, max_cache_len=32)
        with pytest.raises(GeometryError, match="not StaticCache"):
            prefixes.keep(tokens(PAGE), static)
        with pytest.raises(GeometryError, match="offloads"):
            prefixes.keep(
                tokens(PAGE), transformers.DynamicCache(config=model.config, offloading=True)
            )
        cache = prefilled(model, tokens(PAGE))
        cache.layers[2] = type("OwnLayer", (transformers.cache_utils.DynamicLayer,), {})()
        with pytest.raises(GeometryError, match="layer 2 of the cache is a OwnLayer"):
            prefixes.keep(tokens(PAGE), cache)

"""`PrefixCache` with several sequences a call, and with a draft model that proposes tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from tests.adapters.tiny_models import (
    KINDS,
    PAGE,
    WITH_STATES,
    assert_equal_caches,
    assert_equal_tensors,
    cache_tensors,
    forward,
    model_of,
    prefilled,
    tokens,
)

from kvferry.adapters.transformers import PrefixCache, cache_keyword
from kvferry.adapters.transformers.generate_call import (
    beginning_with,
    can_draft_with_windows,
    verifying_from,
)
from kvferry.errors import PlanError

_KINDS = pytest.mark.parametrize("kind", KINDS)
_TOLD: dict[str, Any] = {
    "max_new_tokens": 12,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}


def _prefixes(model: Any, **told: Any) -> PrefixCache:
    told = {"page_size": PAGE, "max_tokens": 256, "host": {"num_bytes": "64MiB"}, **told}
    return PrefixCache(model, "tiny", **told)


def _padded(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of shape ``[1, T]`` as one batch, padded on the left, and its mask."""
    length = max(row.shape[1] for row in rows)
    ids = torch.zeros((len(rows), length), dtype=torch.long, device=rows[0].device)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, length - row.shape[1] :] = row[0]
        mask[number, length - row.shape[1] :] = 1
    return ids, mask


@_KINDS
def test_a_batch_goes_on_with_the_same_bits(kind: str) -> None:
    """Three prompts of one length: cache and logits of the same split, computed anew."""
    model, prompts = model_of(kind), tokens(3 * PAGE + 4, batch=3)
    with _prefixes(model) as prefixes:
        first = prefixes.generate(prompts, **_TOLD)
        cache, num_cached = prefixes.restore(prompts)
        again = prefixes.generate(prompts, **_TOLD)
    assert num_cached == 3 * PAGE
    fresh = prefilled(model, prompts[:, : 3 * PAGE])
    assert_equal_caches(cache, fresh)
    rest = prompts[:, 3 * PAGE :]
    assert_equal_tensors(forward(model, rest, cache), forward(model, rest, fresh), "logits")
    assert torch.equal(first.sequences, again.sequences)
    for one, other in zip(first.logits, again.logits, strict=True):
        assert_equal_tensors(one, other, "logits of the repeated batch")


@_KINDS
def test_a_batch_takes_what_all_rows_have(kind: str) -> None:
    """The shortest kept prefix of the rows is where all go on, and not one row's is another's."""
    model, prompts = model_of(kind), tokens(3 * PAGE + 4, batch=2)
    with _prefixes(model) as prefixes:
        prefixes.prefill(prompts[:1, : 2 * PAGE])
        prefixes.prefill(prompts[:1])
        assert prefixes.restore(prompts).num_tokens == 0
        prefixes.prefill(prompts[1:, : 2 * PAGE])
        cache, num_cached = prefixes.restore(prompts)
        swapped, _ = prefixes.restore(prompts.flip(0))
    assert num_cached == 2 * PAGE
    for row in range(2):
        fresh = cache_tensors(prefilled(model, prompts[row : row + 1, : 2 * PAGE]))
        for name, tensor in cache_tensors(cache).items():
            assert_equal_tensors(tensor[row : row + 1], fresh[name], f"row {row} {name}")
            swapped_row = cache_tensors(swapped)[name][1 - row : 2 - row]
            assert_equal_tensors(swapped_row, fresh[name], f"row {row} {name}, swapped")


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_padded_batch_answers_the_same(kind: str) -> None:
    """Rows of three lengths: tokens and logits with a prefix are those without, in both batches."""
    model = model_of(kind)
    rows = [tokens(count, seed) for seed, count in enumerate((3 * PAGE + 4, PAGE + 9, 2 * PAGE))]
    ids, mask = _padded(*rows)
    with _prefixes(model) as prefixes:
        first = prefixes.generate(ids, attention_mask=mask, **_TOLD)
        cached = prefixes.restore(ids, attention_mask=mask).num_tokens
        again = prefixes.generate(ids, attention_mask=mask, **_TOLD)
        for row in rows:
            assert prefixes.restore(row).num_tokens == (row.shape[1] - 1) // PAGE * PAGE
    assert cached == min(
        ids.shape[1] - row.shape[1] + (row.shape[1] - 1) // PAGE * PAGE for row in rows
    )
    assert cached > 2 * PAGE
    assert torch.equal(first.sequences, again.sequences)
    for step, (one, other) in enumerate(zip(first.logits, again.logits, strict=True)):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5, msg=f"step {step}")


@pytest.mark.parametrize("kind", WITH_STATES)
def test_padding_is_refused_where_a_state_would_hold_it(kind: str) -> None:
    """A model with windows or states takes prompts of one length."""
    ids, mask = _padded(tokens(PAGE + 3), tokens(PAGE))
    with _prefixes(model_of(kind)) as prefixes, pytest.raises(PlanError, match="one length"):
        prefixes.generate(ids, attention_mask=mask)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[1, 2, 3]], [[1, 1, 0]], "on the left"),
        ([[1, 2, 3]], [[1, 0, 1]], "on the left"),
        ([[1, 2, 3]], [[1, 1, 1], [1, 1, 1]], "attention_mask has shape"),
        ([[[1, 2, 3]]], None, "no tokens"),
        ([[1.0, 2.0]], None, "no tokens"),
    ],
)
def test_nonsense_is_refused(ids: Any, mask: Any, message: str) -> None:
    """Padding on the right, masks of another shape, and what is no tokens."""
    mask = None if mask is None else np.array(mask)
    with _prefixes(model_of("gqa")) as prefixes, pytest.raises(PlanError, match=message):
        prefixes.restore(ids, attention_mask=mask)


# ------------------------------------------------------------------------ assisted generation


class _Passes:
    """Counts the tokens of each pass of a model: what was proposed, and accepted, shows in them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.counts: list[int] = []

    def __enter__(self) -> list[int]:
        def note(module: Any, args: Any, told: dict[str, Any]) -> None:
            self.counts.append((args[0] if args else told["input_ids"]).shape[1])

        self._hook = self._model.register_forward_pre_hook(note, with_kwargs=True)
        return self.counts

    def __exit__(self, *exc: object) -> None:
        self._hook.remove()


def _draft_of(model: Any, noise: float = 0.3) -> Any:
    """A draft model that is right now and then: the target with some noise on its weights."""
    draft = copy.deepcopy(model)
    generator = torch.Generator(draft.device).manual_seed(3)
    with torch.no_grad():
        for weight in draft.parameters():
            random = torch.randn(
                weight.shape, generator=generator, device=weight.device, dtype=weight.dtype
            )
            weight.add_(random, alpha=noise * float(weight.std()) if weight.ndim > 1 else 0.0)
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


@pytest.mark.parametrize(
    ("kind", "noise"), [("gqa", 0.3), ("mla", 0.3), ("some_windows", 0.3), ("window", 0.3)]
)
def test_a_restored_draft_proposes_and_accepts_the_same(kind: str, noise: float) -> None:
    """Target and draft restored: tokens, and those of each pass, are the never-evicted run's."""
    model, prompt = model_of(kind), tokens(4 * PAGE + 3)
    draft = _draft_of(model, noise)
    if kind in WITH_STATES and not can_draft_with_windows():
        refused = pytest.raises(PlanError, match="keeps windows")
        with _prefixes(model) as prefixes, _prefixes(draft) as drafts, refused:
            prefixes.generate(prompt, assistant=drafts, max_new_tokens=2)
        return
    told: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    caches = [prefilled(one, prompt[:, : 4 * PAGE]) for one in (model, draft)]
    drafting = beginning_with(draft, caches[1])
    with drafting, verifying_from(model, 4 * PAGE), _Passes(model) as expected_passes:
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=draft,
            **{cache_keyword(model): caches[0]},
            **told,
        )
    with _prefixes(model) as prefixes, _prefixes(draft) as drafts:
        prefixes.prefill(prompt)
        drafts.prefill(prompt)
        assert prefixes.restore(prompt).num_tokens == drafts.restore(prompt).num_tokens == 4 * PAGE
        with _Passes(model) as passes, _Passes(draft) as draft_passes:
            found = prefixes.generate(prompt, assistant=drafts, **told)
        assert torch.equal(found, expected)
        assert passes == expected_passes
        # Both went on from their prefixes: what is left of the prompt, and the proposals.
        assert (draft_passes[0], passes[0]) == (3, 3 + 4)
        assert 5 < len(passes) < 24  # proposals were accepted and refused, or nothing was tested
        alone = prefixes.generate(prompt, **told)
        assert torch.equal(found, alone)  # a draft changes how fast, and not what
        assert torch.equal(prefixes.generate(prompt, assistant=drafts, **told), expected)
        longer = torch.cat([found, tokens(3)], dim=1)
        restored = prefixes.restore(longer).num_tokens
        if kind not in WITH_STATES:
            assert restored == (found.shape[1] - 1) // PAGE * PAGE
            assert_equal_caches(prefixes.restore(longer).cache, _cropped(caches[0], restored))


def _cropped(cache: Any, count: int) -> Any:
    cache.crop(count - cache.get_seq_length())
    return cache


def test_another_draft_cache_is_seen() -> None:
    """The comparison above can fail: a draft that begins with wrong bytes proposes other tokens."""
    model, prompt = model_of("gqa"), tokens(4 * PAGE + 3)
    draft = _draft_of(model)
    passes = []
    for spoil in (0.0, 3.0):
        caches = [prefilled(one, prompt[:, : 4 * PAGE]) for one in (model, draft)]
        for tensor in cache_tensors(caches[1]).values():
            tensor.add_(spoil)
        drafting = beginning_with(draft, caches[1])
        with drafting, verifying_from(model, 4 * PAGE), _Passes(model) as counts:
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                assistant_model=draft,
                max_new_tokens=24,
                do_sample=False,
                **{cache_keyword(model): caches[0]},
            )
        passes.append(counts)
    assert passes[0] != passes[1]


def test_drafts_that_are_not_served() -> None:
    """Recurrent states cannot be taken back, and a model does not draft for itself."""
    model = model_of("gqa")
    with _prefixes(model) as prefixes, _prefixes(model_of("linear")) as drafts:
        with pytest.raises(PlanError, match="recurrent states"):
            prefixes.generate(tokens(PAGE), assistant=drafts, max_new_tokens=2)
        with pytest.raises(PlanError, match="the target itself"):
            prefixes.generate(tokens(PAGE), assistant=prefixes, max_new_tokens=2)

"""What of a call to `generate` can be served, and a draft model that begins with a cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from kvferry.adapters.transformers.cache_shape import cache_keyword
from kvferry.errors import PlanError

__all__ = ["beginning_with", "can_draft_with_windows", "refuse_unserved", "verifying_from"]

_OURS = {
    "cache": "the cache is the one that was restored",
    "past_key_values": "the cache is the one that was restored",
    "cache_implementation": "the cache is a DynamicCache",
    "assistant_model": "give assistant=PrefixCache(draft_model, ...)",
    "inputs": "give input_ids as the first argument",
}
_ONE_A_SEQUENCE = ("num_beams", "num_return_sequences")


def refuse_unserved(model: Any, told: Mapping[str, Any]) -> None:
    """Raise PlanError for arguments of `generate` under which a prefix would not be what it is.

    Args:
        model: Its generation config has the defaults.
        told: Keyword arguments but for `attention_mask`.
    """
    for name, why in _OURS.items():
        if told.get(name) is not None:
            raise PlanError(f"generate got {name}, which PrefixCache gives by itself: {why}")
    if told.get("use_cache") is False:
        raise PlanError("generate got use_cache=False: nothing could be kept; leave it out")
    for name, value in told.items():
        # Pixels, embeddings, positions: the cache depends on them, and page keys do not.
        if hasattr(value, "data_ptr"):
            raise PlanError(
                f"generate got the tensor {name}, and only input_ids and attention_mask are "
                f"served: page keys are made from tokens alone; call model.generate itself"
            )
    config = told.get("generation_config") or model.generation_config
    for name in _ONE_A_SEQUENCE:
        count = told.get(name, getattr(config, name, None)) or 1
        if count != 1:
            raise PlanError(
                f"generate got {name}={count}: a cache whose rows change places is not served; "
                f"use {name}=1"
            )


def can_draft_with_windows() -> bool:
    """Whether windows of a draft model that propose several tokens keep to their size."""
    import transformers

    # They do not in 5.17; versions between have not been tried.
    major, minor = transformers.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (5, 24)


@contextlib.contextmanager
def beginning_with(draft: Any, cache: Any) -> Iterator[None]:
    """Within, the first `generate` of the model `draft` goes on from `cache`.

    Assisted generation makes its draft model's cache anew and takes none, so this is put between.
    """
    generate, keyword, left = draft.generate, cache_keyword(draft), [cache]
    # What a draft proposed in vain is taken back from its cache; a window must record it for that.
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()

    @functools.wraps(generate)
    def first(*args: Any, **kwargs: Any) -> Any:
        if left and kwargs.get(keyword) is None:
            kwargs[keyword] = left.pop()
        return generate(*args, **kwargs)

    draft.generate = first
    try:
        yield
    finally:
        del draft.generate


@contextlib.contextmanager
def verifying_from(target: Any, num_cached: int) -> Iterator[None]:
    """Within, the first pass of assisted generation leaves out what the target's cache holds.

    Transformers 5.17 to 5.24 give that pass the whole prompt, behind a cache that has most of it.
    """
    prepare, is_first = target.prepare_inputs_for_generation, [True]

    @functools.wraps(prepare)  # its arguments are looked at
    def prepare_rest(input_ids: Any, next_sequence_length: int | None = None, **told: Any) -> Any:
        if is_first and num_cached and next_sequence_length is None:
            next_sequence_length = input_ids.shape[1] - num_cached
        is_first.clear()
        return prepare(input_ids, next_sequence_length=next_sequence_length, **told)

    target.prepare_inputs_for_generation = prepare_rest
    try:
        yield
    finally:
        del target.prepare_inputs_for_generation

"""Hugging Face transformers: prefixes of prompts, kept in host memory between calls.

    carrier = PrefixCarrier(cache, config=model.config, model_id="...", num_bytes=1 << 30)
    stored = carrier.store(cache, token_ids)  # None: the pool is full
    restored = carrier.load(stored, next_prompt)
    rest = next_prompt[:, restored.num_tokens :]
    model(rest, **{cache_keyword(model): restored.cache})

or, around `generate`, and kept in host memory and storage by a `KVFerry`:

    with PrefixCache(model, "my-model@rev") as prefixes:
        answer = prefixes.generate(input_ids, max_new_tokens=20)

`PrefixCache` serves batches, windows and recurrent states, on the CPU and on a GPU. A
`PrefixCarrier` serves caches of one sequence, on the CPU, whose layers keep a key and a value for
every token: `DynamicCache` without windows and recurrent states.
"""

from __future__ import annotations

from kvferry.adapters.transformers.cache_shape import (
    CacheShape,
    LayerShape,
    cache_keyword,
    empty_cache,
    fill_cache,
)
from kvferry.adapters.transformers.carrier import (
    Moved,
    PrefixCarrier,
    RestoredPrefix,
    StoredPrefix,
)
from kvferry.adapters.transformers.prefix_cache import Kept, PrefixCache, Restored

__all__ = [
    "CacheShape",
    "Kept",
    "LayerShape",
    "Moved",
    "PrefixCache",
    "PrefixCarrier",
    "Restored",
    "RestoredPrefix",
    "StoredPrefix",
    "cache_keyword",
    "empty_cache",
    "fill_cache",
]

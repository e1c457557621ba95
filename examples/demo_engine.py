"""A small inference engine with a tiered cache: what the demo's two processes both are."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch

from demo_models import Subject
from kvferry import Geometry, KVFerry, Namespace
from kvferry.adapters.transformers import CacheShape, fill_cache
from kvferry.config import Config

PAGE_SIZE = 64
MAX_TOKENS = 2_048
_HOST_BYTES = 384 << 20


class Restored(NamedTuple):
    """What was cached of a prompt."""

    cache: Any
    """A `DynamicCache` that holds `num_tokens` tokens."""

    num_tokens: int
    """How many leading tokens were loaded and may be used."""

    from_disk: int
    """How many of these were not in host memory before."""

    num_bytes: int
    """That were loaded to the engine's pool."""

    seconds: float
    """From the question to the verified cache: looking up, reading from disk, loading."""

    disk_secs: float
    """Of these, what reading from disk took."""

    path: str
    verified: bool
    """Whether every page in `cache` was compared with its digests."""

    bad_pages: tuple[int, ...]
    """Pages that were not what was stored on the host."""

    disk_reason: str
    """Why not more came from disk, in kvferry's words."""


class Kept(NamedTuple):
    """What a store took from the engine's pool."""

    num_pages: int
    num_bytes: int
    seconds: float


class DemoEngine:
    """One sequence at a time. Token t of a prompt lies in token slot t.

    Args:
        subject: The model.
        shape: What its cache keeps of a token.
        storage: The URL of where pages lie.
        run: Keeps apart what other runs of the demo left there.
    """

    def __init__(self, subject: Subject, shape: CacheShape, storage: str, run: str) -> None:
        self._subject = subject
        self._shape = shape
        # What an engine calls its KV pool: for each layer keys and values, [1, heads, tokens, dim].
        self._pool = shape.empty_tensors(MAX_TOKENS)
        self.geometry = Geometry(planes=shape.planes, page_size=PAGE_SIZE)
        # Without a look at the environment: settings of other caches are not meant for a demo.
        config = Config.resolve(
            None,
            {},
            host={"num_bytes": _HOST_BYTES},
            prefetch={"policy": "wait_complete", "threshold_tokens": PAGE_SIZE},
            storage={"enabled": True, "url": storage},
        ).config
        self.cache = KVFerry(
            self.geometry,
            shape.pool_view(self.geometry, self._pool),
            config,
            namespace=Namespace(
                model=subject.name,
                revision=f"demo {run}",
                dtype="float32",
                geometry=self.geometry.fingerprint,
            ),
        )

    def restore(self, tokens: torch.Tensor) -> Restored:
        """Look `tokens`, shape ``[1, T]``, up, and load what is cached of them."""
        # What lies in the pool is from the request before; a load of nothing must not pass for one.
        for pair in self._pool:
            for tensor in pair or ():
                tensor.fill_(torch.nan)
        started = time.perf_counter()
        prompt = tokens[0, :-1]  # the last token is computed in any case: the next one comes of it
        fetch = self.cache.prefetch(prompt)
        while (fetched := fetch.look()) is None:
            fetch.pass_time(timeout=0.05)
        disk_secs = time.perf_counter() - started
        with self.cache.match(prompt) as found:
            loaded = self.cache.load(found, device_slots=np.arange(found.num_tokens))
            loaded.wait()
        usable = loaded.usable_tokens
        cache = self._subject.new_cache()
        if usable:
            fill_cache(cache, self._pool, usable)
        return Restored(
            cache=cache,
            num_tokens=usable,
            from_disk=fetched.num_pages * PAGE_SIZE,
            num_bytes=loaded.num_pages * self.geometry.page_bytes,
            seconds=time.perf_counter() - started,
            disk_secs=disk_secs if fetched.num_pages else 0.0,
            path=", ".join(loaded.paths),
            verified=loaded.verified and loaded.verified_pages * PAGE_SIZE == usable,
            bad_pages=loaded.bad_pages,
            disk_reason=str(fetched.reason),
        )

    def keep(self, tokens: torch.Tensor, cache: Any) -> Kept:
        """Store the whole pages of `tokens`, all of which `cache` holds, that are not there yet."""
        num_tokens = tokens.shape[1]
        for own, computed in zip(self._pool, self._shape.tensors(cache), strict=True):
            for mine, theirs in zip(own or (), computed or (), strict=True):
                mine[:, :, :num_tokens] = theirs[:, :, :num_tokens]
        started = time.perf_counter()
        stored = self.cache.store(tokens[0], device_slots=np.arange(num_tokens))
        stored.wait()
        seconds = time.perf_counter() - started
        return Kept(stored.num_stored, stored.num_stored * self.geometry.page_bytes, seconds)

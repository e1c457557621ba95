"""Prefixes for `generate`, kept by a `KVFerry`. P is tokens a page, B sequences, T tokens."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvferry.adapters.transformers.cache_shape import cache_keyword
from kvferry.adapters.transformers.generate_call import (
    beginning_with,
    can_draft_with_windows,
    refuse_unserved,
    verifying_from,
)
from kvferry.adapters.transformers.kept_rows import KeptRows
from kvferry.adapters.transformers.layer_parts import CacheParts, new_cache
from kvferry.adapters.transformers.sequences import Sequences
from kvferry.adapters.transformers.served_model import check_model, config_digest, probe
from kvferry.cache import KVFerry
from kvferry.closing import ClosedAtExit
from kvferry.errors import ConfigError, GeometryError, PlanError
from kvferry.geometry import DEFAULT_PAGE_SIZE, Geometry
from kvferry.index import Namespace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.config import Config

__all__ = ["Kept", "PrefixCache", "Restored"]


class Restored(NamedTuple):
    """A cache for `generate` to go on from; the caller's own."""

    cache: Any
    """A `DynamicCache` of B sequences."""

    num_tokens: int
    """How many leading columns of `input_ids` it holds; computing begins there."""


class Kept(NamedTuple):
    """What a `keep` offered."""

    num_tokens: tuple[int, ...]
    """Of each row: how long the prefix is that can be found again; whole pages."""

    num_stored: int
    """How many pages and states were not there before."""

    reasons: tuple[str, ...]
    """Of each row: why not all of that is kept, in kvferry's words; empty if it is."""


class PrefixCache(ClosedAtExit):
    """Keeps what `generate` computes of prompts, and lets it go on from there. One thread's.

    Args:
        model: A causal language model in eval mode, on one device.
        model_id: Its name and revision: nobody else may use it for other weights. The model's
            config is part of every key besides.
        page_size: P.
        max_tokens: The longest prefix that is kept, and the size of a buffer on the model's device.
        lora: The adapter on the weights; must be given if the model has one.
        salt: What keeps users apart; `restore` and the others can be given another.
        config: All settings; None: from the environment and its file, see `Config.resolve`.
        overrides: Settings by section, as of `KVFerry`: ``host={"num_bytes": "8GiB"}``.

    Raises:
        MissingDependencyError: torch or transformers is not installed.
        GeometryError: A layer of the model's cache is of a kind that is not served, or the model
            has no attention layer, or is an encoder and a decoder.
        ConfigError, BudgetError, StorageError, ...: As `KVFerry` says.
    """

    def __init__(
        self,
        model: Any,
        model_id: str,
        *,
        page_size: int = DEFAULT_PAGE_SIZE,
        max_tokens: int = 4096,
        lora: str = "",
        salt: str = "",
        config: Config | None = None,
        **overrides: Mapping[str, Any],
    ) -> None:
        if max_tokens < page_size:
            raise ConfigError(
                f"max_tokens {max_tokens} is less than a page of {page_size}; nothing could be kept"
            )
        self.model = model
        self._has_lora = bool(lora)
        check_model(self.model, has_lora=self._has_lora)
        self._parts = CacheParts.of(probe(model))
        if not any(part.field == "keys" for part in self._parts.parts):
            raise GeometryError(
                f"{type(model).__name__} has no attention layer, and its cache does not say how "
                f"many tokens it holds; models with attention in some layers are served"
            )
        self._keyword = cache_keyword(model)
        self._size = page_size
        self._max_tokens = max_tokens // page_size * page_size
        geometry = Geometry(planes=self._parts.planes, page_size=page_size)
        # One sequence at a time goes through it.
        pool = self._parts.empty_tensors(1, self._max_tokens)
        namespace = Namespace(
            model=model_id,
            revision=config_digest(model.config),
            dtype=self._parts.dtypes,
            geometry=geometry.fingerprint,
            lora=lora,
            salt=salt,
        )
        view = self._parts.pool_view(geometry, pool)
        sections: dict[str, Any] = dict(overrides)
        self.ferry = KVFerry(geometry, view, config, namespace=namespace, **sections)
        self._rows = KeptRows(self.ferry, self._parts, pool, self._max_tokens)

    # ------------------------------------------------------------------------ calls

    def generate(
        self,
        input_ids: Any,
        *,
        attention_mask: Any = None,
        assistant: PrefixCache | None = None,
        salt: str | None = None,
        **told: Any,
    ) -> Any:
        """`model.generate`, without computing again what is kept; then keep what it computed.

        The prompt is computed up to its last whole page first, and then the rest. So a prompt
        answers the same whether or not something of it was kept.

        Args:
            input_ids: A tensor on the model's device, shape ``[B, T]``.
            attention_mask: Shape ``[B, T]``; 0 is padding, on the left. None: there is none, even
                where `input_ids` have the padding token.
            assistant: Of the draft model, for assisted generation.
            salt: None: the one this was made with.
            told: What `model.generate` takes beside.

        Returns: What `model.generate` does.

        Raises:
            PlanError: Something is not served: beams, several sequences a prompt, tensors beside
                `input_ids`, a cache of one's own, padding where a model has states.
            TransferTimeoutError, ...: As `KVFerry` says.
        """
        import torch

        refuse_unserved(self.model, told)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        common: dict[str, Any] = {"attention_mask": attention_mask, "salt": salt}
        cache = self._prefilled(input_ids, **common)
        with contextlib.ExitStack() as drafting:
            if assistant is not None:
                assistant._check_drafts(self.model)
                draft_cache = assistant._prefilled(input_ids, **common)
                drafting.enter_context(beginning_with(assistant.model, draft_cache))
                drafting.enter_context(verifying_from(self.model, self._cached(cache)))
                told["assistant_model"] = assistant.model
            given = {**told, "attention_mask": mask, self._keyword: cache}
            answer = self.model.generate(input_ids, **given)
        sequences = getattr(answer, "sequences", answer)
        self.keep(sequences, cache, **common)
        return answer

    def restore(
        self, input_ids: Any, *, attention_mask: Any = None, salt: str | None = None
    ) -> Restored:
        """A new cache with what is kept of a prompt; at least its last token is left to compute.

        Of a batch it is what all rows have. See `generate` for the arguments, and what is raised.
        """
        check_model(self.model, has_lora=self._has_lora)
        prompts = self._sequences(input_ids, attention_mask)
        batch, length = prompts.tokens.shape
        limit = length - 1
        while limit > 0:
            limit, sources = self._rows.found(prompts, limit, salt)
            if limit <= 0:
                break
            tensors = self._parts.empty_tensors(batch, limit)
            ends = [
                self._rows.load(row, source, tensors, prompts.begins[row], limit, salt)
                for row, source in enumerate(sources)
            ]
            if min(ends) == limit:
                return self._restored(tensors, limit)
            limit = max(min(ends), 0)
            if not self._parts.has_states and limit:
                tensors = [tensor[:, :, :limit].contiguous() for tensor in tensors]
                return self._restored(tensors, limit)
        return Restored(new_cache(self.model.config), 0)

    def prefill(
        self,
        input_ids: Any,
        cache: Any = None,
        *,
        attention_mask: Any = None,
        salt: str | None = None,
    ) -> Restored:
        """Compute the whole pages of a prompt that `cache` lacks, and keep them.

        For a prompt that others begin with, such as a system prompt. A model with windows or states
        goes on only from where such a call, or `generate`, stopped: the last whole page.

        Args:
            input_ids: A tensor on the model's device, shape ``[B, T]``.
            cache: From `restore`; it grows. None: what `restore` gives.
            attention_mask, salt: As for `generate`.
        """
        import torch

        check_model(self.model, has_lora=self._has_lora)
        told = self._sequences(input_ids, attention_mask)
        if cache is None:
            cache = self.restore(input_ids, attention_mask=attention_mask, salt=salt).cache
        begin, end = self._cached(cache), told.tokens.shape[1] // self._size * self._size
        if begin >= end:
            return Restored(cache, begin)
        kwargs: dict[str, Any] = {self._keyword: cache, "use_cache": True}
        if told.is_padded:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            kwargs["attention_mask"] = attention_mask[:, :end]
            kwargs["position_ids"] = positions[:, begin:end]
        with torch.no_grad():
            self.model(input_ids[:, begin:end], logits_to_keep=1, **kwargs)
        self.keep(input_ids[:, :end], cache, attention_mask=attention_mask, salt=salt)
        return Restored(cache, end)

    def keep(
        self,
        input_ids: Any,
        cache: Any,
        *,
        attention_mask: Any = None,
        salt: str | None = None,
    ) -> Kept:
        """Keep the whole pages of what `cache` holds. It is only read.

        A model with windows or states keeps nothing unless `cache` holds whole pages and no more.

        Args:
            input_ids: The tokens that `cache` was computed from, shape ``[B, T]``; as `generate`
                returns them. What the cache does not hold of them is left out.
            cache: A `DynamicCache` of this model.
            attention_mask: Of the prompt; what was generated behind it needs none.
            salt: As for `generate`.
        """
        check_model(self.model, has_lora=self._has_lora)
        if attention_mask is not None:
            attention_mask = attention_mask[:, : np.shape(input_ids)[-1]]
        told = self._sequences(input_ids, attention_mask)
        self._parts.check(cache)
        end = min(self._cached(cache), told.tokens.shape[1])
        counts, reasons, num_stored = [], [], 0
        for row in range(len(told.begins)):
            tokens = told.row(row, end)
            count = min(len(tokens), self._max_tokens) // self._size * self._size
            if self._parts.has_states and count != self._cached(cache):
                count = 0
            reason = ""
            if count:
                handle = self._rows.store(row, tokens[:count], told.begins[row], cache, salt)
                num_stored += handle.num_stored
                reason = str(handle.reason)
            counts.append(count)
            reasons.append(reason)
        return Kept(tuple(counts), num_stored, tuple(reasons))

    def close(self) -> None:
        """Give host memory back; what is in storage stays there."""
        self.ferry.close()

    # ------------------------------------------------------------------------ inside

    def _prefilled(self, input_ids: Any, **common: Any) -> Any:
        cache = self.restore(input_ids, **common).cache
        mask = common["attention_mask"]
        if mask is not None:
            common["attention_mask"] = mask[:, :-1]
        return self.prefill(input_ids[:, :-1], cache, **common).cache

    def _restored(self, tensors: list[Any], end: int) -> Restored:
        cache = new_cache(self.model.config)
        self._parts.fill(cache, tensors, end)
        return Restored(cache, end)

    def _cached(self, cache: Any) -> int:
        """How many tokens a cache holds."""
        layers = (cache.layers[part.layer] for part in self._parts.parts if part.field == "keys")
        return max((int(layer.get_seq_length()) for layer in layers), default=0)

    def _sequences(self, input_ids: Any, attention_mask: Any) -> Sequences:
        told = Sequences.of(input_ids, attention_mask)
        if told.is_padded and self._parts.has_states:
            raise PlanError(
                f"attention_mask has padding, and {type(self.model).__name__} keeps windows or "
                f"states, which would hold it; pass prompts of one length, or one at a time"
            )
        return told

    def _check_drafts(self, target: Any) -> None:
        if any(part.is_window for part in self._parts.parts) and not can_draft_with_windows():
            raise PlanError(
                f"{type(self.model).__name__} keeps windows, and such drafts go wrong in the "
                f"transformers installed; use 5.24, or a draft without windows"
            )
        if any(part.is_state and not part.is_window for part in self._parts.parts):
            raise PlanError(
                f"{type(self.model).__name__} keeps recurrent states, and what it drafts cannot be "
                f"taken back; use a draft model with attention alone"
            )
        if self.model is target:
            raise PlanError("the draft model is the target itself; give assistant another model")

"""One request as the scheduler's side sees it: its keys, its blocks, and what it waits for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvferry.adapters.vllm.identity import content_of, lora_of
from kvferry.errors import ConfigError
from kvferry.index import page_keys

if TYPE_CHECKING:
    from kvferry.index import Namespace
    from kvferry.tiers import FetchHandle, Match

__all__ = ["TrackedRequest"]

_PARAMS = {"skip_load": bool, "skip_store": bool, "priority": int}


class TrackedRequest:
    """A request from its first look-up to its end.

    Args:
        request: vLLM's.
        namespace: Of the model; the adapter and the salt of the request are added here.
        page_size: In tokens.
        hash_tokens: Tokens that one of vLLM's block hashes stands for; 0: not known.

    Raises ConfigError for ``kv_transfer_params["kvferry"]`` that are not understood.
    """

    def __init__(
        self, request: Any, namespace: Namespace, page_size: int, hash_tokens: int = 0
    ) -> None:
        self._hash_tokens = hash_tokens
        self._request = request
        self._page_size = page_size
        self.request_id: str = request.request_id
        params = _params_of(request)
        has_tokens = getattr(request, "prompt_embeds", None) is None
        skips_cache = bool(getattr(request, "skip_reading_prefix_cache", False))
        self.may_load = has_tokens and not skips_cache and not params.get("skip_load", False)
        self.may_store = has_tokens and not params.get("skip_store", False)
        self.priority = int(params.get("priority", 0))
        self.blocks: list[list[int]] = []
        """By block table: the blocks of its tokens, first token first."""

        self.offered = 0
        """Leading pages that were offered for storing."""

        self.found: Match | None = None
        """What was promised, until blocks are there."""

        self.skip = 0
        """Tokens that vLLM had when that was promised."""

        self.fetch: FetchHandle | None = None
        self.from_storage = 0
        """Tokens of its last load that came from storage for it."""

        self._content = content_of(request)
        self._keys: list[bytes] = []
        self.rename(namespace)

    def rename(self, namespace: Namespace) -> None:
        """Take other keys from now on, as of another state of the weights."""
        self._namespace = dataclasses.replace(
            namespace,
            lora=lora_of(self._request),
            salt=getattr(self._request, "cache_salt", None) or "",
        )
        self._keys = []
        self.offered = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that are known by now: the prompt, and what was generated."""
        return int(self._request.num_tokens)

    def keys(self, num_pages: int) -> list[bytes]:
        """Of its leading pages; at most those whose tokens are all known."""
        if len(self._keys) < num_pages:
            tokens = self._request.all_token_ids[: num_pages * self._page_size]
            self._keys = page_keys(
                self._namespace,
                list(tokens),
                self._page_size,
                content=self._content,
                known=self._keys,
            )
        return self._keys[:num_pages]

    def block_hashes(self, num_pages: int) -> list[bytes]:
        """What vLLM calls the blocks of its leading pages; empty where it does not say."""
        hashes = list(getattr(self._request, "block_hashes", ()))
        each = self._hash_tokens
        if not each or self._page_size % each:
            return []
        wanted = num_pages * self._page_size // each
        return hashes[:wanted] if len(hashes) >= wanted else []

    def let_go(self) -> None:
        """Give back what was promised and not taken."""
        if self.found is not None:
            self.found.release()
            self.found = None

    def stop_fetch(self) -> None:
        """End what is being brought from storage for it."""
        if self.fetch is not None:
            self.fetch.cancel()
            self.fetch = None


def _params_of(request: Any) -> dict[str, Any]:
    given = (getattr(request, "kv_transfer_params", None) or {}).get("kvferry", {})
    for name, value in given.items():
        if name not in _PARAMS or not isinstance(value, _PARAMS[name]):
            raise ConfigError(
                f"kv_transfer_params has kvferry.{name} = {value!r}; known are: "
                + ", ".join(f"{known} ({kind.__name__})" for known, kind in _PARAMS.items())
            )
    return dict(given)

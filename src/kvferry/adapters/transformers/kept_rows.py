"""The rows of a batch in a `KVFerry`, one by one, by way of a pool on the model's device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.adapters.transformers.layer_parts import CacheParts
    from kvferry.adapters.transformers.sequences import Sequences
    from kvferry.cache import KVFerry

__all__ = ["KeptRows"]

_POLL_SECS = 0.05


class KeptRows(NamedTuple):
    """Finds, loads and stores single sequences."""

    ferry: KVFerry
    parts: CacheParts

    pool: list[Any]
    """Tensors of one sequence of `max_tokens`, which all rows go through."""

    max_tokens: int
    """Whole pages."""

    def found(
        self, prompts: Sequences, limit: int, salt: str | None
    ) -> tuple[int, list[NDArray[np.int64]]]:
        """How many columns all rows have, and the tokens of each row to load."""
        while limit > 0:
            sources = [prompts.row(row, limit) for row in range(len(prompts.begins))]
            ends = [
                begin + self._match(source, salt)
                for begin, source in zip(prompts.begins, sources, strict=True)
            ]
            end = min(limit, *ends)
            # A row token by token can be cut anywhere, and a state nowhere.
            if not self.parts.has_states:
                return end, sources
            if {*ends} == {end}:
                return end, [source[:end] for source in sources]
            limit = end
        return 0, []

    def load(
        self,
        row: int,
        tokens: NDArray[np.int64],
        tensors: list[Any],
        begin: int,
        end: int,
        salt: str | None,
    ) -> int:
        """Load a row into its columns from `begin` up to `end` at most; where that ended."""
        if begin >= end:
            return end
        tokens = tokens[: self.max_tokens]
        with self.ferry.match(tokens, salt=salt) as found:
            loaded = self.ferry.load(found, **self._slots(found.num_tokens))
        loaded.wait()
        count = min(loaded.usable_tokens, end - begin)
        for part, pool, tensor in zip(self.parts.parts, self.pool, tensors, strict=True):
            if part.is_state:
                tensor[row] = pool[0]
            else:
                tensor[row, :, begin : begin + count] = pool[0, :, :count]
        return begin + count

    def store(
        self, row: int, tokens: NDArray[np.int64], begin: int, cache: Any, salt: str | None
    ) -> Any:
        """Store whole pages of a row whose columns begin at `begin`; the handle, waited for."""
        self.parts.read(cache, row, slice(begin, begin + len(tokens)), self.pool)
        handle = self.ferry.store(
            tokens,
            has_state=self.parts.has_states,
            salt=salt,
            **self._slots(len(tokens)),
        )
        handle.wait()
        return handle

    def _match(self, tokens: NDArray[np.int64], salt: str | None) -> int:
        tokens = tokens[: self.max_tokens]
        fetch = self.ferry.prefetch(tokens, salt=salt)
        while fetch.look() is None:  # the prefetch has a deadline of its own
            fetch.pass_time(timeout=_POLL_SECS)
        with self.ferry.match(tokens, salt=salt) as found:
            return found.num_tokens

    def _slots(self, count: int) -> dict[str, Any]:
        return {
            "device_slots": np.arange(count) if self.parts.has_tokens else None,
            "plane_slots": self.parts.plane_slots() or None,
        }

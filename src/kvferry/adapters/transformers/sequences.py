"""What the tokens of a call to `generate` are: one sequence a row, padded on the left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from kvferry.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Sequences"]


class Sequences(NamedTuple):
    """Tokens of a batch, and where each sequence begins."""

    tokens: NDArray[np.int64]
    """Shape ``[B, T]``."""

    begins: tuple[int, ...]
    """How many columns of padding come before the tokens of each row."""

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any = None) -> Self:
        """Take them from what `generate` takes.

        Args:
            input_ids: Shape ``[T]`` or ``[B, T]``.
            attention_mask: Shape of `input_ids`, or shorter, which stands for ones behind it; 0 is
                padding, and comes first. None: there is no padding.

        Raises PlanError for anything else.
        """
        tokens = _array(input_ids)
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        if tokens.ndim != 2 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise PlanError(
                f"input_ids of shape {tokens.shape} and type {tokens.dtype} are no tokens; pass "
                f"whole numbers of shape [T] or [B, T]"
            )
        batch, length = tokens.shape
        if attention_mask is None:
            return cls(tokens.astype(np.int64), (0,) * batch)
        mask = _array(attention_mask)
        mask = mask[None] if mask.ndim == 1 else mask
        if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] > length:
            raise PlanError(
                f"attention_mask has shape {mask.shape}, and input_ids {tokens.shape}; pass one "
                f"mask for each token, shape [B, T]"
            )
        is_token = mask != 0
        begins = mask.shape[1] - is_token.sum(axis=1)
        if (is_token != (np.arange(mask.shape[1]) >= begins[:, None])).any():
            raise PlanError(
                "attention_mask hides tokens that are not on the left; pad on the left "
                "(padding_side='left'), as generate itself asks for"
            )
        return cls(tokens.astype(np.int64), tuple(int(begin) for begin in begins))

    @property
    def is_padded(self) -> bool:
        """Whether some row begins with padding."""
        return any(self.begins)

    def row(self, row: int, end: int) -> NDArray[np.int64]:
        """The tokens of one sequence in the columns before `end`."""
        return self.tokens[row, self.begins[row] : max(end, self.begins[row])]


def _array(values: Any) -> NDArray[Any]:
    return np.asarray(values.tolist() if hasattr(values, "tolist") else values)

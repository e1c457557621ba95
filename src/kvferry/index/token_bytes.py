"""Token ids as little-endian uint32, from whatever an engine keeps them in."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.errors import PageKeyError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["TOKEN_BYTES", "tokens_behind"]

TOKEN_BYTES = 4
_MAX_TOKEN = (1 << 32) - 1
_TYPECODE = "I"


def tokens_behind(tokens: Any, skipped: int, page_size: int) -> tuple[int, memoryview]:
    """How many tokens there are, and the bytes of those in whole pages behind the first `skipped`.

    Raises PageKeyError for tokens that are none, with the position of the first bad one.
    """
    if isinstance(tokens, str | bytes | bytearray):
        raise PageKeyError(
            f"tokens are {type(tokens).__name__}; pass token ids, and packed ones as "
            f"memoryview(tokens).cast('I')"
        )
    # Buffers count as sequences too, and would be slow as such.
    is_sequence = isinstance(tokens, Sequence) and not isinstance(tokens, memoryview | array)
    if hasattr(tokens, "__array__") or not is_sequence:
        ids = _as_array(tokens)
        end = len(ids) // page_size * page_size
        return len(ids), _bytes_of_array(ids[skipped:end], skipped)
    end = len(tokens) // page_size * page_size
    return len(tokens), _bytes_of_sequence(tokens[skipped:end], skipped)


def _as_array(tokens: Any) -> NDArray[Any]:
    if isinstance(tokens, np.ma.MaskedArray):
        raise PageKeyError("tokens are a masked array; pass the ids that count, without a mask")
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as refused:
        raise PageKeyError(
            f"tokens are {type(tokens).__name__}, of which no array can be made ({refused}); pass "
            f"ids in host memory, a tensor as tokens.cpu()"
        ) from refused
    if ids.ndim != 1:
        raise PageKeyError(
            f"tokens have shape {list(ids.shape)}; pass one prompt, of shape [tokens]"
        )
    if ids.dtype.kind not in "iu" and len(ids):
        raise PageKeyError(f"tokens are {ids.dtype}; they must be whole numbers")
    return ids


def _bytes_of_array(ids: NDArray[Any], first: int) -> memoryview:
    may_be_bad = ids.dtype.kind == "i" or ids.dtype.itemsize > TOKEN_BYTES
    if len(ids) and may_be_bad and not 0 <= int(ids.min()) <= int(ids.max()) <= _MAX_TOKEN:
        at = int(np.flatnonzero((ids < 0) | (ids > _MAX_TOKEN))[0])
        raise _bad_token(int(ids[at]), first + at)
    return np.ascontiguousarray(ids, dtype="<u4").data.cast("B")


def _bytes_of_sequence(ids: Sequence[Any], first: int) -> memoryview:
    try:
        packed = array(_TYPECODE, ids)
    except (OverflowError, TypeError) as refused:
        for at, token in enumerate(ids, first):
            try:
                array(_TYPECODE, (token,))
            except (OverflowError, TypeError):
                raise _bad_token(token, at) from refused
        raise
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def _bad_token(token: Any, at: int) -> PageKeyError:
    return PageKeyError(
        f"token {at} is {token!r}; token ids are whole numbers from 0 to {_MAX_TOKEN}, and "
        f"placeholders outside of that need an id of their own"
    )

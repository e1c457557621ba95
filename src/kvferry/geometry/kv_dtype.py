"""How wide a cached value is: the names of KV dtypes, and the bytes that rows of them take.

A format with a `scale_block` keeps its values in one plane and one scale byte a block in another.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvferry.errors import GeometryError

__all__ = ["KV_DTYPES", "KVFormat", "kv_format"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVFormat:
    """One way to keep cached values."""

    name: str
    bits: int
    """Bits a value."""

    scale_block: int = 0
    """Values that share one scale byte in the plane's own scale plane. 0: no scale plane."""

    keeps_row_scales: bool = False
    """Whether a sparse-attention latent row carries its own fp32 scales and a 16-bit rope part."""

    latent_rows_only: bool = False
    """Whether latent rows with their own scales are all that it is: no keys and values."""

    def payload_bytes(self, num_values: int, what: str) -> int:
        """Bytes of `num_values` values; GeometryError names `what` if they end inside a byte."""
        whole, left = divmod(num_values * self.bits, 8)
        if left:
            raise GeometryError(
                f"{what}: {num_values} values of {self.bits} bits do not fill whole bytes; "
                f"choose a wider kv_dtype than {self.name}"
            )
        return whole

    def scale_bytes(self, num_rows: int, row_values: int, what: str) -> int:
        """Bytes of the scales of `num_rows` rows (heads) of `row_values` values each."""
        blocks, left = divmod(row_values, self.scale_block)
        if left:
            raise GeometryError(
                f"{what}: {row_values} values are no multiple of the {self.scale_block} that share "
                f"a scale in {self.name}; choose another kv_dtype"
            )
        return num_rows * blocks


_FORMATS = (
    KVFormat(name="bf16", bits=16),
    KVFormat(name="fp16", bits=16),
    KVFormat(name="fp32", bits=32),
    KVFormat(name="fp8_e4m3", bits=8, keeps_row_scales=True),
    KVFormat(name="fp8_e5m2", bits=8),
    KVFormat(name="fp8_per_tensor", bits=8),
    KVFormat(name="fp8_ds_mla", bits=8, keeps_row_scales=True, latent_rows_only=True),
    KVFormat(name="nvfp4", bits=4, scale_block=16),
    KVFormat(name="mxfp8", bits=8, scale_block=32),
)
_BY_NAME = {known.name: known for known in _FORMATS}
_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp8": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}

KV_DTYPES: tuple[str, ...] = ("auto", *_BY_NAME, *_ALIASES)
"""Every name that `kv_format` and ``kv_dtype=`` take."""


def kv_format(name: Any) -> KVFormat:
    """The format called `name`, in any case (``torch.bfloat16`` reads as ``bfloat16``).

    Raises GeometryError for an unknown name; the message lists the known ones.
    """
    plain = str(name).lower().removeprefix("torch.") if name is not None else ""
    found = _BY_NAME.get(_ALIASES.get(plain, plain))
    if found is None:
        raise GeometryError(f"kv_dtype {name!r} is none of: {', '.join(KV_DTYPES)}")
    return found

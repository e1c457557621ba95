"""Configs of models without a prefix to keep: encoders, and decoders that attend to later tokens.

Their attention has the same fields as a decoder's, so only other fields tell. Where none does, the
geometry of an encoder is what a decoder of its size would keep.
"""

from __future__ import annotations

from kvferry.errors import UnknownArchitectureError
from kvferry.geometry.hf_fields import BY_HAND, Fields

__all__ = ["refuse_encoder"]

_OF_IMAGES_AND_SOUND = ("patch_size", "image_size", "num_channels", "num_mel_bins")


def refuse_encoder(fields: Fields) -> None:
    """Raise UnknownArchitectureError for a model whose tokens attend to later ones."""
    why = _why_encoder(fields)
    if why is not None:
        raise UnknownArchitectureError(
            f"this is the config of a model that attends to later tokens, so that no prefix of a "
            f"cache could serve again: {why}. If one can, {BY_HAND}"
        )


def _why_encoder(fields: Fields) -> str | None:
    if fields.get("type_vocab_size") and fields.get("is_decoder") is not True:
        return "it has type_vocab_size, and not is_decoder true"
    if not fields.has("vocab_size"):
        name = fields.first(*_OF_IMAGES_AND_SOUND)
        if name is not None:
            return f"it has {name}, and no vocab_size"
    if fields.get("is_causal") is False:
        return "is_causal is false"
    if fields.get("use_bidirectional_attention") in (True, "all"):
        return "use_bidirectional_attention is on for all tokens"
    names = fields.get("architectures")
    for name in names if isinstance(names, list | tuple) else ():
        if isinstance(name, str) and name.endswith("ForMaskedLM"):
            return f"its architecture is {name}"
    return None

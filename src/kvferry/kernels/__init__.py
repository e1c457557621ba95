"""The work on bytes: the page digest, the compiled host kernel, and which GPU path is taken."""

from kvferry.kernels.copy_config import (
    MAX_ROWS,
    UNROLLS,
    CopyDecision,
    CopyPath,
    FlatAnswer,
    GroupedAnswer,
    GroupedConfig,
    RealignAnswer,
    Refusal,
    RefusalKind,
    alignment_of,
    resolve_copy,
    resolve_grouped,
)
from kvferry.kernels.digest import NO_DIGEST, digest_spans, page_seed, span_seeds
from kvferry.kernels.native import NativeMove, NativeView, native_digest, native_library

__all__ = [
    "MAX_ROWS",
    "NO_DIGEST",
    "UNROLLS",
    "CopyDecision",
    "CopyPath",
    "FlatAnswer",
    "GroupedAnswer",
    "GroupedConfig",
    "NativeMove",
    "NativeView",
    "RealignAnswer",
    "Refusal",
    "RefusalKind",
    "alignment_of",
    "digest_spans",
    "native_digest",
    "native_library",
    "page_seed",
    "resolve_copy",
    "resolve_grouped",
    "span_seeds",
]

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
from kvferry.kernels.move_kernels import RELAYOUT_BLOCKS, MoveKernels, page_work
from kvferry.kernels.native import NativeMove, NativeView, native_digest, native_library
from kvferry.kernels.span_decision import decide_span, no_kernel, refused_paths
from kvferry.kernels.transfer_args import (
    NO_FAULT,
    SpanArgs,
    fault_of,
    pages_per_launch,
    span_args,
)

__all__ = [
    "MAX_ROWS",
    "NO_DIGEST",
    "NO_FAULT",
    "RELAYOUT_BLOCKS",
    "UNROLLS",
    "CopyDecision",
    "CopyPath",
    "FlatAnswer",
    "GroupedAnswer",
    "GroupedConfig",
    "MoveKernels",
    "NativeMove",
    "NativeView",
    "RealignAnswer",
    "Refusal",
    "RefusalKind",
    "SpanArgs",
    "alignment_of",
    "decide_span",
    "digest_spans",
    "fault_of",
    "native_digest",
    "native_library",
    "no_kernel",
    "page_seed",
    "page_work",
    "pages_per_launch",
    "refused_paths",
    "resolve_copy",
    "resolve_grouped",
    "span_args",
    "span_seeds",
]

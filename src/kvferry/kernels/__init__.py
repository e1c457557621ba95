"""The work on bytes that the paths share: the page digest, and the compiled host kernel."""

from kvferry.kernels.digest import NO_DIGEST, digest_spans, page_seed, span_seeds
from kvferry.kernels.native import NativeMove, NativeView, native_digest, native_library

__all__ = [
    "NO_DIGEST",
    "NativeMove",
    "NativeView",
    "digest_spans",
    "native_digest",
    "native_library",
    "page_seed",
    "span_seeds",
]

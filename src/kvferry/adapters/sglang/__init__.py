"""SGLang: its HiCache with kvferry's kernels, and kvferry's storage below it.

``--hicache-storage-backend dynamic`` is given `KVFerryStorage` by name. It needs the engine, and
nothing else here does.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    # Its base class is the engine's, which need not be installed for the rest.
    if name == "KVFerryStorage":
        return importlib.import_module("kvferry.adapters.sglang.storage").KVFerryStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""SGLang: its HiCache with kvferry's kernels, and kvferry's storage below it.

``--hicache-storage-backend dynamic`` is given `KVFerryStorage` by name. It needs the engine, and
nothing else here does.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvferry.adapters.sglang.hicache import (
    can_use_hicache_jit_kernel,
    can_use_write_back_jit_kernel,
    transfer_hicache_all_layer,
    transfer_hicache_all_layer_mla,
    transfer_hicache_all_layer_mla_staged_lf_pf,
    transfer_hicache_all_layer_staged_lf_pf,
    transfer_hicache_one_layer,
    transfer_hicache_one_layer_mla,
    why_not,
)
from kvferry.adapters.sglang.install import Installed, Replaced, install, install_as_plugin
from kvferry.adapters.sglang.library_rows import (
    transfer_kv_all_layer_mla,
    transfer_kv_all_layer_mla_lf_pf,
    transfer_kv_mamba_lf_pf,
    transfer_kv_mamba_pf_lf,
    transfer_kv_per_layer_mla,
    transfer_kv_per_layer_mla_pf_lf,
)

__all__ = [
    "Installed",
    "Replaced",
    "can_use_hicache_jit_kernel",
    "can_use_write_back_jit_kernel",
    "install",
    "install_as_plugin",
    "transfer_hicache_all_layer",
    "transfer_hicache_all_layer_mla",
    "transfer_hicache_all_layer_mla_staged_lf_pf",
    "transfer_hicache_all_layer_staged_lf_pf",
    "transfer_hicache_one_layer",
    "transfer_hicache_one_layer_mla",
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
    "transfer_kv_mamba_lf_pf",
    "transfer_kv_mamba_pf_lf",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
    "why_not",
]


def __getattr__(name: str) -> Any:
    # Its base class is the engine's, which need not be installed for the rest.
    if name == "KVFerryStorage":
        return importlib.import_module("kvferry.adapters.sglang.storage").KVFerryStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""vLLM: a KV connector over the tiered cache.

    --kv-transfer-config '{"kv_connector": "KVFerryConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvferry.adapters.vllm",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host": {"num_bytes": "8GiB"}}}'

Where kvferry is installed, vLLM knows the name from the entry point, and needs no module path.
The control plane lives in the scheduler's process, a data plane in each worker's. Nothing passes
between them but what vLLM carries: the connector's metadata of a step, and the workers' output.

vLLM is imported when a name of here is first used, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.adapters.vllm.connector import KVFerryConnector
    from kvferry.adapters.vllm.plugin import register

__all__ = ["KVFerryConnector", "register"]

_HOMES = {"KVFerryConnector": "connector", "register": "plugin"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{home}"), name)

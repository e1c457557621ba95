"""The installed vLLM: does it still ask what the adapter answers?"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from tests.adapters.vllm.engines import needs_vllm

# Importing vLLM warns of things that are none of ours.
pytestmark = [*needs_vllm, pytest.mark.filterwarnings("default")]

ANSWERED = [
    "register_kv_caches",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_handshake_metadata",
    "set_xfer_handshake_metadata",
    "build_connector_worker_meta",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "has_pending_push_work",
    "reset_cache",
    "take_events",
    "shutdown",
    "get_kv_connector_stats",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "get_external_cache_hit_sources",
    "requires_piecewise_for_cudagraph",
]


def parameters(of: Any) -> list[str]:
    """Names, without ``self``, ``cls`` and what may be anything."""
    told = inspect.signature(of).parameters.values()
    return [one.name for one in told if one.name not in ("self", "cls")]


def test_every_method_is_called_as_it_is_written() -> None:
    """The base class has each of them, with the same parameters; none is abstract any more."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvferry.adapters.vllm import KVFerryConnector

    for name in ANSWERED:
        ours, theirs = getattr(KVFerryConnector, name), getattr(KVConnectorBase_V1, name)
        assert parameters(ours) == parameters(theirs), name
        assert ours.__qualname__.startswith("KVFerryConnector"), name
    assert not inspect.isabstract(KVFerryConnector)
    constructor = inspect.signature(KVFerryConnector.__init__).parameters
    assert list(constructor) == ["self", "vllm_config", "role", "kv_cache_config"]


def test_messages_are_what_vllm_carries() -> None:
    """They count as vLLM's kinds of metadata."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    import kvferry.adapters.vllm.connector  # noqa: F401  tells vLLM of them
    from kvferry.adapters.vllm.messages import RankHandshake, RankReport, StepMetadata

    assert issubclass(StepMetadata, base.KVConnectorMetadata)
    assert issubclass(RankReport, base.KVConnectorWorkerMetadata)
    assert issubclass(RankHandshake, base.KVConnectorHandshakeMetadata)


def test_the_connector_is_known_by_its_name() -> None:
    """The entry point registers it, once and again."""
    from importlib.metadata import entry_points

    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    (point,) = entry_points(group="vllm.general_plugins", name="kvferry")
    point.load()()
    point.load()()
    found = KVConnectorFactory.get_connector_class_by_name("KVFerryConnector")
    assert found.__name__ == "KVFerryConnector"


def test_figures_reach_prometheus() -> None:
    """Counts of two steps add up, in the log's shape and in the endpoint's."""
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from kvferry.adapters.vllm import KVFerryConnector

    class Settings:
        kv_transfer_config = None

    stats = KVFerryConnector.build_kv_connector_stats({"loaded_tokens": 3})
    stats = stats.aggregate(KVFerryConnector.build_kv_connector_stats({"loaded_tokens": 4}))
    assert stats.reduce() == {"loaded_tokens": 7}
    assert KVFerryConnector.build_kv_connector_stats().is_empty()
    prom = KVFerryConnector.build_prom_metrics(
        Settings(), {one: one for one in (Counter, Gauge, Histogram)}, ["engine"], {0: ["0"]}
    )
    prom.observe(stats.to_dict())
    prom.observe(stats.to_dict())
    assert REGISTRY.get_sample_value("kvferry_vllm_loaded_tokens_total", {"engine": "0"}) == 14


def test_the_secondary_tier_is_whole() -> None:
    """No abstract method is left, and vLLM finds the class by its path."""
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    told = {"type": "KVFerryTier", "module_path": "kvferry.adapters.vllm.secondary"}
    found = SecondaryTierFactory.get_tier_class(told)
    assert not inspect.isabstract(found)
    base = found.__mro__[1]
    for name in ("lookup", "submit_store", "submit_load", "get_finished_jobs", "drain_jobs",
                 "on_new_request", "has_pending_work", "shutdown"):  # fmt: skip
        assert parameters(getattr(found, name)) == parameters(getattr(base, name)), name


def test_models_of_several_groups_are_refused() -> None:
    """vLLM ends where blocks of such a model are told as lost; one group is as it was."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvferry.adapters.vllm.connector import _block_groups
    from kvferry.errors import ConfigError

    def group(name: str) -> SimpleNamespace:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
        return SimpleNamespace(kv_cache_spec=spec, layer_names=[name])

    one = SimpleNamespace(kv_cache_groups=[group("a")])
    assert [(found.layer_names, found.block_size) for found in _block_groups(one)] == [(("a",), 16)]
    two = SimpleNamespace(kv_cache_groups=[group("a"), group("b")])
    with pytest.raises(ConfigError, match="2 KV cache groups"):
        _block_groups(two)

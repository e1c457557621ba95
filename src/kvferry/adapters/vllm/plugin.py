"""What vLLM calls in each of its processes, through the entry point ``vllm.general_plugins``."""

from __future__ import annotations

__all__ = ["CONNECTOR_NAME", "register"]

CONNECTOR_NAME = "KVFerryConnector"


def register() -> None:
    """Make the connector known to vLLM by its name; again does nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR_NAME, "kvferry.adapters.vllm", CONNECTOR_NAME
        )

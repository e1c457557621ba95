"""What kvferry knows of a model and of the memory its cache lies in."""

from __future__ import annotations

from kvferry.geometry.hf_fields import load_config
from kvferry.geometry.models import ConfigReading, read_hf_config
from kvferry.geometry.order import LayerOrder, host_pool_view, layer_order
from kvferry.geometry.spec import DEFAULT_PAGE_SIZE, Geometry, HitKind, HitRule, Plane, Span
from kvferry.geometry.view import LayerView, PoolView, SlotDims

__all__ = [
    "DEFAULT_PAGE_SIZE",
    "ConfigReading",
    "Geometry",
    "HitKind",
    "HitRule",
    "LayerOrder",
    "LayerView",
    "Plane",
    "PoolView",
    "SlotDims",
    "Span",
    "host_pool_view",
    "layer_order",
    "load_config",
    "read_hf_config",
]

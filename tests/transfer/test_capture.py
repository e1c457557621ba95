"""Transfers in CUDA graphs, where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
from tests.rig import Rig, each_path

from kvferry.errors import PlanError, TransferError
from kvferry.geometry import Geometry, Plane
from kvferry.transfer import TransferEngine, TransferPlan


@each_path
def test_the_cpu_has_no_graphs(path: str) -> None:
    """Capturing between pools in host memory is refused, and bad plans are told as ever."""
    geometry = Geometry(planes=(Plane(name="k", num_layers=2, element_size=96),), page_size=8)
    rig = Rig.make(geometry, num_rows=32, num_slots=2)
    with TransferEngine(rig.device, rig.host, path=path) as engine, rig.nothing_moves():
        plan = TransferPlan.load(geometry, host_slots=[0], device_slots=np.arange(8))
        with pytest.raises(TransferError, match=f"path {path} moves on the CPU"):
            engine.capture(plan)
        plan = TransferPlan.load(geometry, host_slots=[2], device_slots=np.arange(8))
        with pytest.raises(PlanError, match="there are only 2 slots"):
            engine.capture(plan)

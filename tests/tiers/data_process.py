"""A process that has pools, transfers and storage, and does what the pipe says."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.geometry import Geometry, PoolView
from kvferry.memory import HostPool, SlotOwner
from kvferry.storage import MemoryBackend
from kvferry.tiers import DataPlane, MovePages
from kvferry.transfer import TransferEngine
from kvferry.types import Direction, SlotKind


def serve(pipe: Connection, told: dict[str, Any], num_slots: int, device_rows: int) -> None:
    """Until the pipe says None: commands in, completions out; and questions of the test."""
    geometry = Geometry.from_dict(told)
    rng = np.random.default_rng(3)
    tensors = {
        plane.name: [
            rng.integers(0, 256, (device_rows, plane.element_size), dtype=np.uint8)
            for _ in range(plane.num_layers)
        ]
        for plane in geometry.planes
    }
    view = PoolView.from_tensors(geometry, tensors)
    pool = HostPool(geometry, num_slots=num_slots)
    # The control plane is elsewhere, and says who has which slot.
    runs = pool.allocate(num_slots, SlotOwner.INDEX)
    assert runs is not None
    kind = SlotKind.PAGE
    data = DataPlane(geometry, {kind: TransferEngine(view, pool)}, {kind: pool})
    while True:
        if not pipe.poll(0.01):
            completions = data.poll()
            if completions:
                pipe.send(("completions", completions))
            continue
        message = pipe.recv()
        if message is None:
            break
        what, given = message
        if what == "commands":
            for command in given:
                running = data.execute(command)
                is_load = isinstance(command, MovePages) and command.direction is Direction.LOAD
                if is_load and running is not None:
                    for layer in running.handle.plan.model_layers:
                        running.wait_layer(layer)
        elif what == "attach":
            data.attach_storage(given, MemoryBackend())
        elif what == "rows":
            rows = {name: [layer[given] for layer in layers] for name, layers in tensors.items()}
            pipe.send(("rows", rows))
        elif what == "wipe":
            for tensor in (layer for layers in tensors.values() for layer in layers):
                tensor[given] = 0xA5
        elif what == "flip":
            slot, byte = given
            with pool.slot_view(slot) as bytes_of_page:
                bytes_of_page[byte] ^= 1
    assert data.close(10)
    pool.free(range(num_slots), SlotOwner.INDEX)
    pool.close()
    pipe.send(("closed", None))

"""Plain, slow references that the fast paths are compared with. Nothing is shared with them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kvferry.types import Direction

if TYPE_CHECKING:
    from kvferry.geometry import LayerView, PoolView
    from kvferry.transfer import HostPages, TransferPlan

__all__ = ["reference_digest", "reference_row", "reference_transfer"]

_MASK = (1 << 64) - 1


def reference_digest(span: bytes, *, page_seed: int, plane_index: int, layer: int) -> int:
    """The page digest as its definition reads, one word at a time in Python integers."""

    def mix(value: int) -> int:
        value ^= value >> 33
        value = value * 0xFF51AFD7ED558CCD & _MASK
        value ^= value >> 33
        value = value * 0xC4CEB9FE1A85EC53 & _MASK
        return value ^ value >> 33

    total = 0
    for position in range(0, len(span), 8):
        word = int.from_bytes(span[position : position + 8].ljust(8, b"\0"), "little")
        step = 0x243F6A8885A308D3 + position // 8 * 0x9E3779B97F4A7C15 & _MASK
        keyed = word ^ ((step ^ step >> 32) * 0xC2B2AE3D27D4EB4F & _MASK)
        total += keyed * ((keyed >> 32) + 0xD6E8FEB86659FD93)
    where = mix(mix(plane_index << 32 | layer) ^ len(span))
    return mix(total + mix(page_seed ^ where) & _MASK) or 1


def reference_row(view: LayerView, row: int) -> bytes:
    """The bytes of one element, piece by piece."""
    start = view.row_address(row)
    return b"".join(
        ctypes.string_at(start + piece * view.piece_stride, view.piece_size)
        for piece in range(view.num_pieces)
    )


def reference_transfer(plan: TransferPlan, device: PoolView, host: HostPages) -> None:
    """Carry out `plan` element by element, without digests; pools must be in host memory."""
    for span in plan.spans:
        name, layer = span.plane.name, span.layer
        on_device, on_host = device.view(name, layer), host.view.view(name, layer)
        listed = plan.rows_on_host(name)
        for page, slot in enumerate(plan.host_slots.tolist()):
            for row, device_row in enumerate(listed[page].tolist()):
                host_row = slot * span.rows + row
                if plan.direction is Direction.STORE:
                    _write_row(on_host, host_row, reference_row(on_device, device_row))
                else:
                    _write_row(on_device, device_row, reference_row(on_host, host_row))


def _write_row(view: LayerView, row: int, element: bytes) -> None:
    start = view.row_address(row)
    for piece in range(view.num_pieces):
        part = element[piece * view.piece_size : (piece + 1) * view.piece_size]
        ctypes.memmove(start + piece * view.piece_stride, part, len(part))

"""Bytes that give themselves away: a pattern for every row, and poison around and between rows.

Byte i of a row is byte ``i mod 8`` of ``mix64(seed, pool, layer, slot, i div 8)``, so a wrong page,
a wrong layer, half a row and stale bytes all look different, whatever the element size. Everything
that no transfer may touch is `POISON`.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.testing.numeric import assert_bytes_equal, first_difference

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvferry.geometry import LayerView

__all__ = [
    "GUARD_BYTES",
    "POISON",
    "GuardedBuffer",
    "memory_at",
    "mix64",
    "moved_view",
    "pattern_rows",
    "read_rows",
    "write_rows",
]

GUARD_BYTES = 4096
"""Bytes of poison before and after each buffer."""

POISON = 0xA5

# The finalizer of SplitMix64 (Sebastiano Vigna, public domain).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix64(*values: Any) -> npt.NDArray[np.uint64]:
    """64 well-mixed bits of `values`, which are integers or arrays of them, in this order.

    Returns:
        An array of the shape that `values` broadcast to.
    """
    mixed = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):  # modulo 2^64 on purpose
        for value in values:
            mixed = (mixed + _STEP) ^ np.asarray(value).astype(np.uint64)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
            mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
            mixed = mixed ^ (mixed >> np.uint64(31))
    return np.asarray(mixed)


def pattern_rows(
    seed: int, *, pool: int, layer: int, slots: Any, element_size: int
) -> npt.NDArray[np.uint8]:
    """What the rows `slots` of one layer of one pool hold.

    Args:
        seed: Of the test; different seeds give unrelated bytes.
        pool: Any number for the plane or pool.
        layer: Any number for the layer.
        slots: Shape ``[rows]``.
        element_size: In bytes.

    Returns:
        Shape ``[rows, element_size]``.
    """
    rows = np.asarray(slots, dtype=np.uint64).ravel()
    words = np.arange(-(-element_size // 8), dtype=np.uint64)
    mixed = mix64(seed, pool, layer, rows[:, None], words)
    whole = np.ascontiguousarray(mixed, dtype="<u8").view(np.uint8)
    return np.ascontiguousarray(whole.reshape(len(rows), 8 * len(words))[:, :element_size])


class GuardedBuffer:
    """`num_bytes` of host memory, all `POISON`, with `GUARD_BYTES` of poison on either side."""

    device = "cpu"

    def __init__(self, num_bytes: int) -> None:
        self._whole = np.full(num_bytes + 2 * GUARD_BYTES, POISON, dtype=np.uint8)
        self.inside = self._whole[GUARD_BYTES : GUARD_BYTES + num_bytes]
        """Shape: ``[num_bytes]``; the buffer itself, not a copy."""

    @property
    def num_bytes(self) -> int:
        """The size without guards."""
        return self.inside.size

    @property
    def address(self) -> int:
        """Of the first byte inside."""
        return int(self.inside.ctypes.data)

    def fill(self, image: npt.NDArray[np.uint8] | None = None) -> None:
        """Make the inside `image`, shape ``[num_bytes]``, None: poison; and the guards whole."""
        end = GUARD_BYTES + self.num_bytes
        self._whole[:GUARD_BYTES] = self._whole[end:] = POISON
        self.inside[:] = POISON if image is None else image

    def check(self, expected: npt.NDArray[np.uint8] | None = None, what: str = "buffer") -> None:
        """Fail unless the guards are whole and the inside is `expected`; None: all poison.

        Raises AssertionError with the first damaged byte, counted from the start of the inside or
        by its distance from it.
        """
        if expected is None:
            expected = np.full(self.num_bytes, POISON, dtype=np.uint8)
        end = GUARD_BYTES + self.num_bytes
        guards = (self._whole[:GUARD_BYTES], self._whole[end:])
        for guard, place in zip(guards, ("before its start", "after its end"), strict=True):
            where = first_difference(guard, _GUARD)
            if where is not None:
                away = GUARD_BYTES - where[0] if guard is guards[0] else where[0]
                raise AssertionError(
                    f"{what}: the guard {away} bytes {place} was overwritten: "
                    f"found 0x{int(guard[where]):02x}, expected 0x{POISON:02x}"
                )
        assert_bytes_equal(self.inside, expected, what, ["byte"])


_GUARD = np.full(GUARD_BYTES, POISON, dtype=np.uint8)


def memory_at(address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """The memory at `address` as an array that owns nothing. Shape: ``[num_bytes]``."""
    memory: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    array: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
    return array


def moved_view(view: LayerView, *, from_address: int, to_address: int) -> LayerView:
    """`view` over a copy of its memory: the byte at `from_address` lies at `to_address` there."""
    return dataclasses.replace(view, address=view.address - from_address + to_address)


def write_rows(view: LayerView, rows: Any, elements: npt.NDArray[np.uint8]) -> None:
    """Put ``elements[i]`` into row ``rows[i]``. Shapes: ``[n]`` and ``[n, element_size]``."""
    at = np.asarray(rows, dtype=np.int64).ravel()
    pieces = np.ascontiguousarray(elements).view(np.dtype((np.void, view.piece_size)))
    _strided(view)[np.divmod(at, view.block_rows)] = pieces.reshape(at.size, view.num_pieces)


def read_rows(view: LayerView, rows: Any) -> npt.NDArray[np.uint8]:
    """The elements in `rows`. Shapes: ``[n]`` to ``[n, element_size]``."""
    at = np.asarray(rows, dtype=np.int64).ravel()
    found = np.ascontiguousarray(_strided(view)[np.divmod(at, view.block_rows)])
    return found.view(np.uint8).reshape(at.size, view.element_size)


def _strided(view: LayerView) -> npt.NDArray[Any]:
    """Shape ``[blocks, block_rows, pieces]`` of opaque pieces."""
    return np.ndarray(
        (view.num_blocks, view.block_rows, view.num_pieces),
        dtype=np.dtype((np.void, view.piece_size)),
        buffer=memory_at(view.address, view.end - view.address),
        strides=(view.block_stride, view.row_stride, view.piece_stride),
    )

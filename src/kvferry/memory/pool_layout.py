"""Where things lie in a host pool's mapping: the slots, then a digest of 8 bytes a (slot, span)."""

from __future__ import annotations

import dataclasses

from kvferry.errors import ConfigError
from kvferry.geometry import Geometry
from kvferry.memory.budget import format_bytes
from kvferry.memory.slot_runs import whole_number
from kvferry.types import SlotKind

__all__ = ["PoolLayout"]

_DIGEST_BYTES = 8


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """Slots of `kind` as `geometry` lays them out."""

    geometry: Geometry
    kind: SlotKind

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return self.geometry.slot_bytes(self.kind)

    @property
    def num_spans(self) -> int:
        """Digests of a slot."""
        return len(self.geometry.spans(self.kind))

    def digest_offset(self, num_slots: int) -> int:
        """Where the digest table begins."""
        return -(-num_slots * self.slot_bytes // _DIGEST_BYTES) * _DIGEST_BYTES

    def total_bytes(self, num_slots: int) -> int:
        """Slots and digest table."""
        return self.digest_offset(num_slots) + num_slots * self.num_spans * _DIGEST_BYTES

    def count_slots(self, num_bytes: int | None, num_slots: int | None) -> int:
        """How many slots a pool of either size has.

        Raises:
            ConfigError: There are no planes for such slots, not exactly one size was given, or it
                holds no slot.
        """
        if self.slot_bytes == 0:
            raise ConfigError(
                f"this geometry has no planes for {self.kind.value} slots: make a pool only for "
                f"the kinds of slots that it has"
            )
        if num_slots is not None and num_bytes is None:
            return whole_number("num_slots", num_slots, 1)
        if num_bytes is None or num_slots is not None:
            raise ConfigError(
                f"num_bytes={num_bytes} and num_slots={num_slots}: give one of the two"
            )
        num_bytes = whole_number("num_bytes", num_bytes, 0)
        count = num_bytes // (self.slot_bytes + self.num_spans * _DIGEST_BYTES)
        while count > 0 and self.total_bytes(count) > num_bytes:
            count -= 1
        if count < 1:
            raise ConfigError(
                f"num_bytes={num_bytes} holds no slot: one {self.kind.value} slot and its "
                f"digests take {format_bytes(self.total_bytes(1))}; give at least that"
            )
        return count

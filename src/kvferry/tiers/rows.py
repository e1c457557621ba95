"""Device slots of some pages out of those of a prompt, wherever the indices are."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.errors import PlanError
from kvferry.transfer import joined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvferry.geometry import Geometry

__all__ = ["DeviceSlots", "check_whole"]


class DeviceSlots:
    """Where the tokens of a prompt lie on the device, from its page `first_page` on.

    Args:
        geometry: For the rows a page of each plane.
        device_slots: Shape ``[tokens]`` or ``[pages, P]``: a list, an array or a tensor. More than
            is asked for is left alone.
        plane_slots: By plane, shape ``[pages, R]`` or ``[pages·R]``: for planes with another number
            of rows a page.
        first_page: The page that the first entry belongs to.
        device_run: See `TransferPlan.build`.
        stream: In which indices that lie on the device are ready; None: the current one.
    """

    def __init__(
        self,
        geometry: Geometry,
        device_slots: Any,
        plane_slots: Mapping[str, Any] | None = None,
        *,
        first_page: int = 0,
        device_run: int = 1,
        stream: int | None = None,
    ) -> None:
        known = [plane.name for plane in geometry.planes]
        if unknown := [name for name in plane_slots or () if name not in known]:
            raise PlanError(
                f"plane_slots names {', '.join(map(repr, unknown))}; this geometry has: "
                f"{', '.join(known)}"
            )
        self._geometry = geometry
        self._device_slots = None if device_slots is None else _flat(device_slots)
        self._plane_slots = {name: _flat(given) for name, given in (plane_slots or {}).items()}
        self.first_page = first_page
        self.device_run = device_run
        self._stream = stream

    def tokens(self, pages: Sequence[int]) -> Any:
        """Shape ``[pages, P]``, or None where planes bring their own."""
        if self._device_slots is None:
            return None
        size = self._geometry.page_size
        return self._take("device_slots", self._device_slots, pages, size)

    def planes(self, pages: Sequence[int], names: Sequence[str] | None) -> dict[str, Any] | None:
        """By plane: shape ``[pages, R]``; of those named only, None: of all."""
        taken = {}
        for name, given in self._plane_slots.items():
            if names is not None and name not in names:
                continue
            rows = self._geometry.rows_per_page(self._geometry.plane(name))
            taken[name] = self._take(f"plane_slots[{name!r}]", given, pages, rows)
        return taken or None

    def check_apart(self, pages: Sequence[int], planes: Sequence[str]) -> None:
        """Raise PlanError where two of `pages` have a row of one of `planes` in common.

        A plan looks for that itself; this is for pages that go in two plans. Slots that lie on the
        device are not looked at, as there.
        """
        looked_at: set[int] = set()
        for name in planes:
            flat = self._plane_slots.get(name, self._device_slots)
            if id(flat) in looked_at or not isinstance(flat, np.ndarray):
                continue
            looked_at.add(id(flat))
            rows = self._geometry.rows_per_page(self._geometry.plane(name))
            taken = np.sort(self._take(f"slots of plane {name!r}", flat, pages, rows).ravel())
            twice = taken[1:][taken[1:] == taken[:-1]]
            if twice.size:
                raise PlanError(
                    f"device slots of plane {name!r} name {twice[0]} twice as a destination; "
                    f"every row may be written once in a load"
                )

    def _take(self, what: str, flat: Any, pages: Sequence[int], rows: int) -> Any:
        positions = [page - self.first_page for page in pages]
        if not positions:
            return flat[:0].reshape(0, rows)
        first, last = positions[0], positions[-1]
        if (last + 1) * rows > len(flat) or first < 0:
            raise PlanError(
                f"{what} has {len(flat)} entries from page {self.first_page} on, but pages up to "
                f"{pages[-1]} move, with {rows} rows each: give {(last + 1) * rows}"
            )
        if last - first + 1 == len(positions):  # a slice costs no index on the device
            return flat[first * rows : (last + 1) * rows].reshape(-1, rows)
        if getattr(flat, "is_cuda", False):
            pieces = [slice(at * rows, (at + count) * rows) for at, count in _runs(positions)]
            return joined(flat, pieces, self._stream).reshape(-1, rows)
        return flat[: (last + 1) * rows].reshape(-1, rows)[positions]


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as neighbours: the first of each run, and how many."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and position == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((position, 1))
    return found


def check_whole(what: str, tokens: int, most: int | None = None) -> int:
    """`tokens`, a number of leading tokens of a prompt. Raises PlanError for one that is none."""
    try:
        count = operator.index(tokens)
    except TypeError as bad:
        raise PlanError(f"{what} is {tokens!r}; it must be a whole number") from bad
    if count < 0 or (most is not None and count > most):
        limit = "more" if most is None else f"at most {most}"
        raise PlanError(f"{what} is {count}; give 0 or {limit}, counted from the prompt's start")
    return count


def _flat(given: Any) -> Any:
    if getattr(given, "is_cuda", False):
        if not given.is_contiguous():
            raise PlanError("device slots on the device are not contiguous: pass .contiguous()")
        return given.reshape(-1)
    try:
        return np.asarray(given).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as bad:
        raise PlanError(f"device slots are no array of whole numbers: {bad}") from bad

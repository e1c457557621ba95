"""What the core knows of a model: planes, page bytes and a fingerprint.

A *plane* is one kind of cached tensor, an *element* is what one row of it keeps in one layer, a
*page* is ``page_size`` consecutive tokens. A *span* is the part of a page slot that one layer of
one plane fills: ``rows_per_page`` elements, back to back. Letters used below: P = page size in
tokens, R = rows a page, E = element size in bytes, L = layers of a plane.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.errors import GeometryError
from kvferry.geometry.checks import check_fields, check_int, check_type
from kvferry.geometry.plane import MAX_ROWS, HitKind, HitRule, Plane, plane_from_dict
from kvferry.types import SlotKind

__all__ = ["DEFAULT_PAGE_SIZE", "Geometry", "HitKind", "HitRule", "Plane", "Span"]

DEFAULT_PAGE_SIZE = 64

# Changing what the fingerprint covers, or the order of bytes in a slot, makes every stored page
# unreadable: then, and only then, this number goes up.
_FINGERPRINT_VERSION = 1
_FINGERPRINT_HEX_DIGITS = 32

# 16 bytes is the widest package a GPU thread moves at once, so spans start on it. 4 KiB is what
# direct I/O wants of a buffer and a file offset.
_DEFAULT_SPAN_ALIGNMENT = 16
_DEFAULT_SLOT_ALIGNMENT = 4096


@dataclasses.dataclass(frozen=True)
class Span:
    """Where one layer of one plane lies in a slot: ``[offset, offset + num_bytes)``."""

    index: int
    """Position among the spans of its slot kind: the column of the digest table."""

    plane: Plane
    plane_index: int
    """Position of the plane in the geometry, over both slot kinds."""

    layer: int
    """Which of the plane's own layers."""

    rows: int
    offset: int
    num_bytes: int

    @property
    def model_layer(self) -> int:
        """The model layer this span belongs to."""
        return self.plane.model_layers[self.layer]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Geometry:
    """The planes of a model on one rank, and how a page of them lies in memory.

    A page slot holds the planes in the given order; each plane its layers in order; each layer R
    elements back to back. Every span starts on `span_alignment` and every slot on
    `slot_alignment`; bytes between are padding. All of it is covered by `fingerprint`.

    Raises GeometryError for no planes, two of one name, or a bad size or alignment.
    """

    planes: tuple[Plane, ...]
    page_size: int = DEFAULT_PAGE_SIZE
    """P, in tokens."""

    span_alignment: int = _DEFAULT_SPAN_ALIGNMENT
    slot_alignment: int = _DEFAULT_SLOT_ALIGNMENT

    def __post_init__(self) -> None:
        if not isinstance(self.planes, Iterable):
            raise GeometryError(f"planes must be a list of planes, not {self.planes!r}")
        object.__setattr__(self, "planes", tuple(self.planes))
        for plane in self.planes:
            check_type("a plane", plane, Plane, "or use Geometry.from_dict for mappings")
        if not self.planes:
            raise GeometryError("a geometry needs at least one plane; got none")
        names = [plane.name for plane in self.planes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise GeometryError(f"plane names must differ; {', '.join(twice)} is used twice")
        check_int("page_size", self.page_size, 1, MAX_ROWS)
        for field in ("span_alignment", "slot_alignment"):
            value = getattr(self, field)
            check_int(field, value, 1, 1 << 30)
            if value & (value - 1):
                raise GeometryError(f"{field} must be a power of two, not {value}")
        if self.slot_alignment % self.span_alignment:
            raise GeometryError(
                f"slot_alignment {self.slot_alignment} must be a multiple of span_alignment "
                f"{self.span_alignment}"
            )

    def __repr__(self) -> str:
        names = ", ".join(plane.name for plane in self.planes)
        return f"Geometry({names}; page_bytes={self.page_bytes}, fingerprint={self.fingerprint!r})"

    def plane(self, name: str) -> Plane:
        """The plane called `name`; GeometryError names the planes there are."""
        for plane in self.planes:
            if plane.name == name:
                return plane
        known = ", ".join(plane.name for plane in self.planes)
        raise GeometryError(f"there is no plane {name!r}; this geometry has: {known}")

    def rows_per_page(self, plane: Plane) -> int:
        """R of `plane`: its own, or one row a token."""
        return self.page_size if plane.rows_per_page is None else plane.rows_per_page

    @functools.cached_property
    def _spans(self) -> dict[SlotKind, tuple[Span, ...]]:
        spans: dict[SlotKind, list[Span]] = {kind: [] for kind in SlotKind}
        ends = dict.fromkeys(SlotKind, 0)
        for plane_index, plane in enumerate(self.planes):
            kind, rows = plane.slot_kind, self.rows_per_page(plane)
            for layer in range(plane.num_layers):
                offset = _align(ends[kind], self.span_alignment)
                span = Span(
                    index=len(spans[kind]),
                    plane=plane,
                    plane_index=plane_index,
                    layer=layer,
                    rows=rows,
                    offset=offset,
                    num_bytes=rows * plane.element_size,
                )
                spans[kind].append(span)
                ends[kind] = offset + span.num_bytes
        return {kind: tuple(found) for kind, found in spans.items()}

    def spans(self, kind: SlotKind = SlotKind.PAGE) -> tuple[Span, ...]:
        """Every span of a slot of `kind`, in the order of their bytes."""
        return self._spans[kind]

    @functools.cached_property
    def _moves(self) -> dict[SlotKind, tuple[Span, ...]]:
        return {
            kind: tuple(sorted(spans, key=lambda span: (span.model_layer, span.plane_index)))
            for kind, spans in self._spans.items()
        }

    def spans_by_layer(self, kind: SlotKind = SlotKind.PAGE) -> tuple[Span, ...]:
        """Every span of a slot of `kind`, by model layer, then plane; the same tuple each time."""
        return self._moves[kind]

    @functools.cached_property
    def _model_layers(self) -> dict[SlotKind, tuple[int, ...]]:
        return {
            kind: tuple(dict.fromkeys(span.model_layer for span in spans))
            for kind, spans in self._moves.items()
        }

    def model_layers(self, kind: SlotKind = SlotKind.PAGE) -> tuple[int, ...]:
        """The model layers that keep something in a slot of `kind`, in ascending order."""
        return self._model_layers[kind]

    def payload_bytes(self, kind: SlotKind = SlotKind.PAGE) -> int:
        """The bytes of KV in one slot of `kind`, padding not counted."""
        return sum(span.num_bytes for span in self.spans(kind))

    def slot_bytes(self, kind: SlotKind = SlotKind.PAGE) -> int:
        """The bytes from one slot of `kind` to the next, padding counted; 0 if it has no planes."""
        spans = self.spans(kind)
        if not spans:
            return 0
        return _align(spans[-1].offset + spans[-1].num_bytes, self.slot_alignment)

    @property
    def page_bytes(self) -> int:
        """The bytes of KV in one page: Σ L·R·E over the planes that follow the tokens."""
        return self.payload_bytes(SlotKind.PAGE)

    @property
    def state_bytes(self) -> int:
        """The bytes of one checkpoint: Σ L·E over the planes kept at exact boundaries."""
        return self.payload_bytes(SlotKind.STATE)

    @property
    def bytes_per_token(self) -> float:
        """Bytes a token costs over all planes that follow the tokens; whole unless pages pack.

        An exact int where the page size divides `page_bytes`, else the nearest float.
        """
        whole, left = divmod(self.page_bytes, self.page_size)
        return self.page_bytes / self.page_size if left else whole

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that differ wherever two geometries lay out bytes differently."""
        told = {"version": _FINGERPRINT_VERSION, **self.to_dict()}
        text = json.dumps(told, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:_FINGERPRINT_HEX_DIGITS]

    def to_dict(self) -> dict[str, Any]:
        """The geometry as JSON-ready values; `from_dict` reads it back."""
        return {
            "page_size": self.page_size,
            "span_alignment": self.span_alignment,
            "slot_alignment": self.slot_alignment,
            "planes": [plane.to_dict() for plane in self.planes],
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Geometry:
        """A geometry from planes given by hand, or from `to_dict`.

        Only ``planes`` is needed, and of each plane only ``name``, ``num_layers`` and
        ``element_size``. Raises GeometryError for an unknown or missing field.
        """
        if not isinstance(told, Mapping):
            raise GeometryError(
                f"a geometry must be a mapping of fields, not {type(told).__name__}"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        check_fields("geometry", told, known, {"planes"})
        planes = told["planes"]
        if not isinstance(planes, Sequence) or isinstance(planes, str | bytes):
            raise GeometryError(f"planes must be a list of planes, not {type(planes).__name__}")
        return cls(**{**told, "planes": tuple(plane_from_dict(plane) for plane in planes)})

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any] | str | Any,
        *,
        tp: int = 1,
        tp_rank: int = 0,
        pp: int | None = None,
        pp_rank: int = 0,
        pp_layers: Sequence[int] | None = None,
        kv_dtype: str | None = None,
        page_size: int = DEFAULT_PAGE_SIZE,
        draft_layers: str = "none",
        overrides: Mapping[str, Any] | None = None,
    ) -> Geometry:
        """The geometry of a Hugging Face model on one rank; see `kvferry.geometry.models`."""
        from kvferry.geometry.models import geometry_from_hf_config

        return geometry_from_hf_config(
            config,
            tp=tp,
            tp_rank=tp_rank,
            pp=pp,
            pp_rank=pp_rank,
            pp_layers=pp_layers,
            kv_dtype=kv_dtype,
            page_size=page_size,
            draft_layers=draft_layers,
            overrides=overrides,
        )


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment

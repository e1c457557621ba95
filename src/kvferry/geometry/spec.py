"""What the core knows of a model: planes, page bytes and a fingerprint.

A *plane* is one kind of cached tensor, an *element* is what one row of it keeps in one layer, a
*page* is ``page_size`` consecutive tokens. A *span* is the part of a page slot that one layer of
one plane fills: ``rows_per_page`` elements, back to back. Letters used below: P = page size in
tokens, R = rows a page, E = element size in bytes, L = layers of a plane.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.errors import GeometryError
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

_MAX_ELEMENT_SIZE = 1 << 40
_MAX_LAYERS = 1 << 20
_MAX_ROWS = 1 << 20
_MAX_LAST_TOKENS = 1 << 40


class HitKind(enum.StrEnum):
    """Which pages of a plane must be present for a prefix to be usable."""

    ALL_PAGES = "all_pages"
    LAST_TOKENS = "last_tokens"
    EXACT_BOUNDARY = "exact_boundary"


@dataclasses.dataclass(frozen=True)
class HitRule:
    """When a plane allows a prefix to be used."""

    kind: HitKind = HitKind.ALL_PAGES
    last_tokens: int = 0
    """With LAST_TOKENS: how many tokens before the end of the prefix must be there."""

    def __post_init__(self) -> None:
        if self.last_tokens != 0:
            _check_int("last_tokens", self.last_tokens, 0, _MAX_LAST_TOKENS)
        wants_tokens = self.kind is HitKind.LAST_TOKENS
        if wants_tokens != (self.last_tokens > 0):
            raise GeometryError(
                f"hit rule {self.kind.value} with last_tokens={self.last_tokens}: last_tokens must "
                f"be positive for last_tokens and 0 for the other kinds"
            )

    @classmethod
    def last(cls, tokens: int) -> HitRule:
        """Only the last `tokens` tokens of a prefix are needed (a sliding window)."""
        return cls(HitKind.LAST_TOKENS, tokens)

    @classmethod
    def exact_boundary(cls) -> HitRule:
        """Usable only at the very token where a checkpoint was taken (a recurrent state)."""
        return cls(HitKind.EXACT_BOUNDARY)

    def pages_needed(self, prefix_pages: int, page_size: int) -> int:
        """How many pages at the end of a prefix of `prefix_pages` pages this plane needs."""
        if self.kind is HitKind.ALL_PAGES:
            return prefix_pages
        if self.kind is HitKind.EXACT_BOUNDARY:
            return min(prefix_pages, 1)
        return min(prefix_pages, -(-self.last_tokens // page_size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plane:
    """One kind of cached tensor.

    Raises GeometryError when a size is not a positive integer or `layer_ids` does not name each of
    its layers once, in ascending order.
    """

    name: str
    """For people and for slices of a plan: ``k``, ``v``, ``latent``, ``index_key``, ``state``…"""

    num_layers: int
    """L. May differ between planes of one model."""

    element_size: int
    """E, the bytes of one row in one layer, on this rank."""

    rows_per_page: int | None = None
    """R. None: one row a token. 1: one row a page (packed pages), or one a checkpoint (state)."""

    hit_rule: HitRule = HitRule()

    layer_ids: tuple[int, ...] | None = None
    """The model layer of each of the plane's layers. None: 0 … L-1."""

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not name.isidentifier():
            raise GeometryError(
                f"plane name {name!r} must be an identifier such as 'k' or 'index_key'"
            )
        for field, limit in (("num_layers", _MAX_LAYERS), ("element_size", _MAX_ELEMENT_SIZE)):
            _check_int(f"plane {self.name!r}: {field}", getattr(self, field), 1, limit)
        if self.rows_per_page is not None:
            _check_int(f"plane {self.name!r}: rows_per_page", self.rows_per_page, 1, _MAX_ROWS)
        if self.hit_rule.kind is HitKind.EXACT_BOUNDARY and self.rows_per_page != 1:
            raise GeometryError(
                f"plane {self.name!r} exists at exact boundaries only, so it keeps one row a "
                f"checkpoint: give rows_per_page=1, not {self.rows_per_page}"
            )
        if self.layer_ids is not None:
            ids = tuple(self.layer_ids)
            object.__setattr__(self, "layer_ids", ids)
            for layer_id in ids:
                _check_int(f"plane {self.name!r}: layer id", layer_id, 0, _MAX_LAYERS)
            if len(ids) != self.num_layers or any(a >= b for a, b in itertools.pairwise(ids)):
                raise GeometryError(
                    f"plane {self.name!r} has {self.num_layers} layers, but layer_ids names "
                    f"{len(ids)}: name each layer once, in ascending order"
                )
            if ids == tuple(range(self.num_layers)):
                object.__setattr__(self, "layer_ids", None)  # one spelling, one fingerprint

    @property
    def model_layers(self) -> Sequence[int]:
        """The model layer of each of the plane's layers."""
        return range(self.num_layers) if self.layer_ids is None else self.layer_ids

    @property
    def slot_kind(self) -> SlotKind:
        """Which kind of host slot keeps this plane."""
        exact = self.hit_rule.kind is HitKind.EXACT_BOUNDARY
        return SlotKind.STATE if exact else SlotKind.PAGE

    def to_dict(self) -> dict[str, Any]:
        """The plane as JSON-ready values; `Geometry.from_dict` reads it back."""
        return {
            "name": self.name,
            "num_layers": self.num_layers,
            "element_size": self.element_size,
            "rows_per_page": self.rows_per_page,
            "hit_rule": self.hit_rule.kind.value,
            "last_tokens": self.hit_rule.last_tokens,
            "layer_ids": None if self.layer_ids is None else list(self.layer_ids),
        }


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


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        object.__setattr__(self, "planes", tuple(self.planes))
        if not self.planes:
            raise GeometryError("a geometry needs at least one plane; got none")
        names = [plane.name for plane in self.planes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise GeometryError(f"plane names must differ; {', '.join(twice)} is used twice")
        _check_int("page_size", self.page_size, 1, _MAX_ROWS)
        for field in ("span_alignment", "slot_alignment"):
            value = getattr(self, field)
            _check_int(field, value, 1, 1 << 30)
            if value & (value - 1):
                raise GeometryError(f"{field} must be a power of two, not {value}")
        if self.slot_alignment % self.span_alignment:
            raise GeometryError(
                f"slot_alignment {self.slot_alignment} must be a multiple of span_alignment "
                f"{self.span_alignment}"
            )

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
        """Bytes a token costs over all planes that follow the tokens; whole unless pages pack."""
        per_token = self.page_bytes / self.page_size
        return int(per_token) if per_token.is_integer() else per_token

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
        _check_fields("geometry", told, known, {"planes"})
        planes = told["planes"]
        if not isinstance(planes, Sequence) or isinstance(planes, str | bytes):
            raise GeometryError(f"planes must be a list of planes, not {type(planes).__name__}")
        return cls(**{**told, "planes": tuple(_plane_from_dict(plane) for plane in planes)})

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any] | str | Any,
        *,
        tp: int = 1,
        tp_rank: int = 0,
        pp: int = 1,
        pp_rank: int = 0,
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
            kv_dtype=kv_dtype,
            page_size=page_size,
            draft_layers=draft_layers,
            overrides=overrides,
        )


def _plane_from_dict(told: Any) -> Plane:
    if not isinstance(told, Mapping):
        raise GeometryError(f"a plane must be a mapping of fields, not {type(told).__name__}")
    known = {field.name for field in dataclasses.fields(Plane)} | {"last_tokens"}
    _check_fields("plane", told, known, {"name", "num_layers", "element_size"})
    kwargs = dict(told)
    last_tokens = kwargs.pop("last_tokens", 0)
    kind = kwargs.pop("hit_rule", HitKind.ALL_PAGES)
    try:
        rule = HitRule(HitKind(kind), last_tokens)
    except ValueError as bad:
        if isinstance(bad, GeometryError):
            raise
        kinds = ", ".join(known_kind.value for known_kind in HitKind)
        raise GeometryError(f"hit_rule {kind!r} is none of: {kinds}") from bad
    layer_ids = kwargs.get("layer_ids")
    if layer_ids is not None:
        if not isinstance(layer_ids, Sequence) or isinstance(layer_ids, str | bytes):
            raise GeometryError(f"layer_ids must be a list of layers, not {layer_ids!r}")
        kwargs["layer_ids"] = tuple(layer_ids)
    return Plane(hit_rule=rule, **kwargs)


def _check_fields(what: str, told: Mapping[str, Any], known: set[str], needed: set[str]) -> None:
    unknown, missing = sorted(set(told) - known), sorted(needed - set(told))
    if unknown or missing:
        raise GeometryError(
            f"{what}: unknown fields {unknown}, missing fields {missing}; "
            f"it takes {', '.join(sorted(known))}"
        )


def _check_int(what: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise GeometryError(f"{what} must be a whole number from {low} to {high}, not {value!r}")


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment

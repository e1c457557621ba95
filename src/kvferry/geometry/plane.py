"""Planes: what each kind of cached tensor is, and which pages of it a prefix needs.

Letters: R = rows a page, E = element size in bytes, L = layers of a plane.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.errors import GeometryError
from kvferry.geometry.checks import check_fields, check_int, check_type
from kvferry.types import SlotKind

__all__ = ["MAX_ROWS", "HitKind", "HitRule", "Plane", "plane_from_dict"]

MAX_ROWS = 1 << 20
"""The most rows, or tokens, that a page may have."""

_MAX_ELEMENT_SIZE = 1 << 40
_MAX_LAYERS = 1 << 20
_MAX_LAST_TOKENS = 1 << 40


class HitKind(enum.StrEnum):
    """Which pages of a plane must be present for a prefix to be usable."""

    ALL_PAGES = "all_pages"
    LAST_TOKENS = "last_tokens"
    EXACT_BOUNDARY = "exact_boundary"


def _hit_kind(kind: Any) -> HitKind:
    if isinstance(kind, str) and kind in list(HitKind):
        return HitKind(kind)
    kinds = ", ".join(known.value for known in HitKind)
    raise GeometryError(f"hit_rule {kind!r} is none of: {kinds}")


@dataclasses.dataclass(frozen=True)
class HitRule:
    """When a plane allows a prefix to be used.

    `kind` may be given by its value (``"all_pages"``). Raises GeometryError for an unknown kind, or
    for `last_tokens` that do not go with it.
    """

    kind: HitKind = HitKind.ALL_PAGES
    last_tokens: int = 0
    """With LAST_TOKENS: how many tokens before the end of the prefix must be there."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _hit_kind(self.kind))
        check_int("last_tokens", self.last_tokens, 0, _MAX_LAST_TOKENS)
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

    Raises GeometryError when a size is not a positive integer, `hit_rule` is no HitRule, or
    `layer_ids` does not name each of its layers once, in ascending order.
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
            check_int(f"plane {self.name!r}: {field}", getattr(self, field), 1, limit)
        if self.rows_per_page is not None:
            check_int(f"plane {self.name!r}: rows_per_page", self.rows_per_page, 1, MAX_ROWS)
        check_type(
            f"plane {self.name!r}: hit_rule", self.hit_rule, HitRule, "such as HitRule.last(4096)"
        )
        if self.hit_rule.kind is HitKind.EXACT_BOUNDARY and self.rows_per_page != 1:
            raise GeometryError(
                f"plane {self.name!r} exists at exact boundaries only, so it keeps one row a "
                f"checkpoint: give rows_per_page=1, not {self.rows_per_page}"
            )
        if self.layer_ids is not None:
            ids = _checked_ids(self.name, self.layer_ids)
            object.__setattr__(self, "layer_ids", ids)
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


def plane_from_dict(told: Any) -> Plane:
    """A plane from a mapping of its fields; GeometryError for an unknown or missing one."""
    if not isinstance(told, Mapping):
        raise GeometryError(f"a plane must be a mapping of fields, not {type(told).__name__}")
    known = {field.name for field in dataclasses.fields(Plane)} | {"last_tokens"}
    check_fields("plane", told, known, {"name", "num_layers", "element_size"})
    kwargs = dict(told)
    last_tokens = kwargs.pop("last_tokens", 0)
    rule = HitRule(kwargs.pop("hit_rule", HitKind.ALL_PAGES), last_tokens)
    return Plane(hit_rule=rule, **kwargs)


def _checked_ids(name: str, layer_ids: Any) -> tuple[int, ...]:
    if not isinstance(layer_ids, Sequence) or isinstance(layer_ids, str | bytes):
        raise GeometryError(
            f"plane {name!r}: layer_ids must be a list of layers or None, not {layer_ids!r}"
        )
    for layer_id in layer_ids:
        check_int(f"plane {name!r}: layer id", layer_id, 0, _MAX_LAYERS)
    return tuple(layer_ids)

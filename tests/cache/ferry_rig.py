"""An engine that has tensors and nothing else, and the caches over it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvferry.cache import KVFerry
from kvferry.geometry import Geometry, HitRule, Plane, PoolView
from kvferry.index import Namespace

PAGE = 4
K = Plane(name="k", num_layers=3, element_size=40)
V = Plane(name="v", num_layers=3, element_size=24)
STATE = Plane(
    name="state", num_layers=2, element_size=72, rows_per_page=1, hit_rule=HitRule.exact_boundary()
)
TOKENS = list(range(18))
QUICK: dict[str, Any] = {
    "host": {"num_bytes": "128KiB"},
    "load": {"threshold_tokens": 1},
    "prefetch": {"threshold_tokens": 1},
}


class Engine:
    """Device tensors of an engine."""

    def __init__(self, planes: tuple[Plane, ...] = (K, V), rows: int = 160, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.geometry = Geometry(planes=planes, page_size=PAGE)
        self.tensors = {
            plane.name: [
                rng.integers(0, 256, (rows, plane.element_size), dtype=np.uint8)
                for _ in range(plane.num_layers)
            ]
            for plane in planes
        }
        self.pool = PoolView.from_tensors(self.geometry, self.tensors)
        self.namespace = Namespace(
            model="m", revision="1", dtype="u8", geometry=self.geometry.fingerprint
        )

    def cache(self, **given: Any) -> KVFerry:
        """A cache of it; sections of the config win over `QUICK`."""
        for name in (*QUICK, "store", "integrity"):
            given[name] = {**QUICK.get(name, {}), **given.get(name, {})}
        given.setdefault("namespace", self.namespace)
        return KVFerry(self.geometry, self.pool, **given)

    def rows(self, first: int, count: int) -> dict[str, Any]:
        """A copy of some rows."""
        return {
            name: np.stack([layer[first : first + count] for layer in layers])
            for name, layers in self.tensors.items()
        }


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether all rows are the same."""
    return all((one[name] == other[name]).all() for name in one)

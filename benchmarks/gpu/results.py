"""What `make gpu` wrote, as tables and pictures read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

TORCH, BATCH, GROUPED = "torch index+copy", "memcpy batch", "grouped"
BASELINES = (TORCH, BATCH, GROUPED)
NOTHING = "-"
"""What a cell of a table says where there is nothing to say."""


def together(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result with the steps of all, and the machine of the last."""
    steps: dict[str, Any] = {}
    for result in results:
        steps |= result["steps"]
    return {**results[-1], "steps": steps}


def results_of(told: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By step: what its benchmark wrote, where it wrote something."""
    return {name: step["result"] for name, step in told["steps"].items() if step.get("result")}


def rows_of(results: Mapping[str, Mapping[str, Any]], name: str) -> Sequence[Row]:
    """The rows of step `name`; none where it was not run."""
    found: Sequence[Row] = results.get(name, {}).get("rows", ())
    return found

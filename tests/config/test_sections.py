"""What sections work out of their values."""

from __future__ import annotations

import pytest

from kvferry.config import PrefetchConfig


@pytest.mark.parametrize(
    ("config", "host_pages", "budget"),
    [
        (PrefetchConfig(), 1000, 500),
        (PrefetchConfig(budget_fraction=0.001), 10, 1),
        (PrefetchConfig(budget_fraction=1), 10, 10),
        (PrefetchConfig(budget_pages=64), 1000, 64),
        (PrefetchConfig(budget_pages=64, budget_fraction=0.001), 1000, 64),
        (PrefetchConfig(budget_pages=64), 10, 10),
        (PrefetchConfig(), 0, 0),
    ],
)
def test_the_budget_of_prefetches(config: PrefetchConfig, host_pages: int, budget: int) -> None:
    """Pages win over a share; there is always room for one, and never more than the tier has."""
    assert config.budget(host_pages) == budget

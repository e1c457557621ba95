"""What sections work out of their values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.config import HostConfig, PrefetchConfig

_BYTES = st.integers(1, 1 << 50)
_SHARES = st.floats(0, 1, exclude_max=True)


@given(_BYTES, _SHARES, st.booleans(), st.integers(0, 1 << 45))
def test_all_pools_are_within_the_configured_size(
    num_bytes: int, state_fraction: float, has_states: bool, device_pool_bytes: int
) -> None:
    """Pages and checkpoints together are what was configured: nothing is taken beside it."""
    host = HostConfig(num_bytes=num_bytes, state_fraction=state_fraction)
    shares = host.shares(device_pool_bytes=device_pool_bytes, has_states=has_states)
    assert sum(shares) == num_bytes
    assert min(shares) >= 0
    assert shares.state_bytes <= (state_fraction * num_bytes if has_states else 0)


def test_a_ratio_is_of_the_whole_device_pool() -> None:
    """Without bytes the size is a multiple of the device pool; bytes win over a ratio."""
    host = HostConfig(device_ratio=2.5, state_fraction=0.2)
    assert host.shares(device_pool_bytes=1000, has_states=False) == (2500, 0)
    assert host.shares(device_pool_bytes=1000, has_states=True) == (2000, 500)
    host = HostConfig(device_ratio=2.5, num_bytes=700)
    assert host.shares(device_pool_bytes=1000, has_states=False) == (700, 0)


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

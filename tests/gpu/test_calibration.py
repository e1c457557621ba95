"""Calibration on the GPU that is there: every figure, within bounds that any link keeps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kvferry.kernels.jit import process_loader
from kvferry.transfer import Measured, calibrate, find_profile, save_profile
from kvferry.transfer.link_bench import QUOTAS, WIDTHS
from kvferry.types import Direction

pytestmark = pytest.mark.gpu

# In two seconds, by a link of 55 GB/s.
_MOST_BYTES = 2 * 55e9
_FIGURES = {
    "link.load", "link.store", "copy_seconds", "piece_seconds", "widths.load", "widths.store",
    "direct.load", "direct.store", "launch_seconds",
}  # fmt: skip


def test_a_profile_of_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded bytes and steps, figures that make sense together, and a file that is found again."""
    context = process_loader().driver.context(0)
    told: list[Measured] = []
    profile = calibrate(context, report=told.append)
    print(profile.to_dict())  # noqa: T201  what this machine's link can do
    print(*told, sep="\n")  # noqa: T201
    assert {one.name for one in told} | set(profile.unmeasured) == _FIGURES
    assert not {one.name for one in told} & set(profile.unmeasured)
    assert 0 < sum(one.num_bytes for one in told) < _MOST_BYTES
    assert profile.copy_seconds < 1e-3
    assert profile.launch_seconds < 1e-3
    if profile.unmeasured:
        pytest.skip(f"time was up before {', '.join(profile.unmeasured)}; the link is busy")
    for way in Direction:
        # No row goes faster than the whole, but for noise; narrow ones never do better than wide.
        rates = dict(profile.widths[way])
        assert list(rates) == list(WIDTHS)
        assert max(rates.values()) < 1.1 * profile.link[way]
        assert rates[WIDTHS[0]] < 1.1 * rates[WIDTHS[-1]]
        assert rates[WIDTHS[-1]] > 0.5 * profile.link[way]
        assert 0.2 * profile.link[way] < profile.direct[way] < 1.1 * profile.link[way]
        assert profile.direct_blocks[way] in QUOTAS
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "cache"))
    saved = save_profile(context, profile)
    found = find_profile(context)
    assert (found.profile, found.path, found.reason) == (profile, saved.path, None)


def test_two_calibrations_agree_and_leave_no_memory_behind() -> None:
    """What the medians say is the link's, not chance's; device memory is as free as before."""
    context = process_loader().driver.context(0)
    first = calibrate(context)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    second = calibrate(context)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= before - (2 << 20)
    for way in Direction:
        for width in WIDTHS:
            one, other = (profile.copy_rate(way, width) for profile in (first, second))
            assert math.isclose(one, other, rel_tol=0.25), (way, width, one, other)
        assert math.isclose(first.link[way], second.link[way], rel_tol=0.1)

"""kvferry's functions in place of the installed engine's own."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import warnings

import pytest

import kvferry.adapters.sglang as adapter
from kvferry.adapters.sglang.install import HOMES

pytest.importorskip("sglang", reason="SGLang is not installed; see make test-sglang")

pytestmark = pytest.mark.filterwarnings("ignore")

# The engine's imports warn of what is none of ours.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    home = importlib.import_module(HOMES[1])
    mha = importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
    mla = importlib.import_module("sglang.srt.mem_cache.pool_host.mla")
    dsa = importlib.import_module("sglang.srt.mem_cache.pool_host.dsa")
    mxfp8 = importlib.import_module("sglang.srt.mem_cache.pool_host.mha_mxfp8")

_NAMES = [name for name in adapter.__all__ if name.startswith(("transfer_hicache", "can_use"))]


def test_the_pools_call_ours_and_then_theirs_again() -> None:
    """Whatever name they have imported a function under."""
    theirs = {name: getattr(home, name) for name in _NAMES}
    with adapter.install() as done:
        assert done.version == importlib.metadata.version("sglang")
        for name in _NAMES:
            assert getattr(home, name) is getattr(adapter, name)
        for pool in (mha, mla, dsa, mxfp8):
            for name, value in vars(pool).items():
                assert not any(value is one for one in theirs.values()), (pool.__name__, name)
        one = "jit_transfer_hicache_one_layer_mla"
        assert getattr(mla, one) is adapter.transfer_hicache_one_layer_mla
        left = {name.rpartition(".")[2] for name in done.left}
        assert left >= {
            "transfer_hicache_one_layer_page_unified_lf",
            "transfer_hicache_all_layer_staged_lf_page_unified",
            "can_use_page_unified_load_back_jit_kernel",
        }
    assert {name: getattr(home, name) for name in _NAMES} == theirs
    assert getattr(mla, one) is theirs["transfer_hicache_one_layer_mla"]


@pytest.mark.parametrize("name", _NAMES)
def test_parameters_have_their_names_places_and_defaults(name: str) -> None:
    """A call that the engine's function takes, ours takes, and it means the same."""
    theirs = inspect.signature(getattr(home, name)).parameters
    ours = inspect.signature(getattr(adapter, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for one, parameter in theirs.items():
        assert (ours[one].kind, ours[one].default) == (parameter.kind, parameter.default), one
    assert all(ours[one].default is None for one in list(ours)[len(theirs) :])

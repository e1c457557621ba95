"""kvferry's functions in place of the installed engine's own."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import warnings
from pathlib import Path

import pytest

import kvferry.adapters.sglang as adapter
from kvferry.adapters.sglang import library_rows
from kvferry.adapters.sglang.install import HOMES, POOLS

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


@pytest.mark.parametrize("pool", POOLS)
def test_every_call_of_a_pool_is_one_that_ours_takes(pool: str) -> None:
    """Without a GPU the engine leaves its kernel library out; its calls tell what it passes."""
    spec = importlib.util.find_spec(pool)
    assert spec is not None
    assert spec.origin is not None
    calls = [
        node
        for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in library_rows.__all__
    ]
    assert calls
    for call in calls:
        assert isinstance(call.func, ast.Name)
        ours = inspect.signature(getattr(adapter, call.func.id))
        names = [keyword.arg for keyword in call.keywords]
        assert None not in names, f"line {call.lineno} passes what cannot be seen"
        given = {name: None for name in names if name}
        ours.bind(*call.args, **given)


def test_no_function_of_ours_is_for_nobody() -> None:
    """Each is called by some pool of the engine."""
    called = set[str]()
    for pool in POOLS:
        spec = importlib.util.find_spec(pool)
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_text()
        called |= {name for name in library_rows.__all__ if f" {name}(" in text}
    assert called == set(library_rows.__all__)


def test_ours_take_what_the_engine_says_of_its_own() -> None:
    """States of recurrent layers have functions of the engine's, which can be read anywhere."""
    spec = importlib.util.find_spec("sglang.kernels.ops.mamba.transfer_mamba")
    assert spec is not None
    assert spec.origin is not None
    functions = {
        node.name: [one.arg for one in node.args.args]
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for name in ("transfer_kv_mamba_pf_lf", "transfer_kv_mamba_lf_pf"):
        assert list(inspect.signature(getattr(adapter, name)).parameters) == functions[name]

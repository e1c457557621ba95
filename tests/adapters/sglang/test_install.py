"""Replacing an engine's functions, over modules that stand for it."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import kvferry.adapters.sglang as adapter
from kvferry.adapters.sglang import library_rows
from kvferry.adapters.sglang.install import HOMES, POOLS
from kvferry.errors import BackendInterfaceError, MissingDependencyError

_NAMES = [name for name in adapter.__all__ if name.startswith(("transfer_hicache", "can_use"))]


def _function(name: str) -> Callable[..., Any]:
    """One with the parameters of ours, but for those that only ours has."""
    import inspect

    ours = inspect.signature(getattr(adapter, name))
    own = ("v_cache_src_stride_bytes", "v_cache_dst_stride_bytes", "v_element_size")
    kept = [one for one in ours.parameters.values() if one.name not in own]

    def theirs(*_: Any, **__: Any) -> str:
        return "theirs"

    theirs.__signature__ = ours.replace(parameters=kept)  # type: ignore[attr-defined]
    return theirs


class Engine:
    """Modules in place of an installed engine's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: str, version: str) -> None:
        self._patch = monkeypatch
        for name in [one for one in sys.modules if one.split(".")[0] == "sglang"]:
            monkeypatch.delitem(sys.modules, name)
        real = importlib.metadata.version
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: version if name == "sglang" else real(name)
        )
        self.home: Any = self.module(home, **{name: _function(name) for name in _NAMES})
        self.home.transfer_hicache_one_layer_page_unified_lf = lambda: "theirs"
        self.home.can_use_something_new = lambda: "theirs"

    def module(self, name: str, **names: Any) -> Any:
        """A module and the packages it is in."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            if path not in sys.modules:
                made = ModuleType(path)
                made.__path__ = []
                self._patch.setitem(sys.modules, path, made)
        found = sys.modules[name]
        vars(found).update(names)
        return found


@pytest.fixture(params=HOMES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with the functions in one of their homes."""
    return Engine(monkeypatch, request.param, "0.5.23" if "kernels" in request.param else "0.5.18")


def test_everything_is_replaced_where_it_was_imported(engine: Engine) -> None:
    """In its home, in pools that have renamed it, and for whoever imports it later; then undone."""
    theirs = {name: getattr(engine.home, name) for name in _NAMES}
    pool = engine.module(
        "sglang.srt.mem_cache.pool_host.mla",
        jit_one=theirs["transfer_hicache_one_layer_mla"],
        can_use_hicache_jit_kernel=theirs["can_use_hicache_jit_kernel"],
        other=len,
    )
    stranger = ModuleType("elsewhere")
    stranger.one = theirs["transfer_hicache_one_layer_mla"]  # type: ignore[attr-defined]
    sys.modules["elsewhere"] = stranger
    try:
        done = adapter.install()
    finally:
        del sys.modules["elsewhere"]
    for name in _NAMES:
        assert getattr(engine.home, name) is getattr(adapter, name)
    assert pool.jit_one is adapter.transfer_hicache_one_layer_mla
    assert pool.can_use_hicache_jit_kernel is adapter.can_use_hicache_jit_kernel
    assert (pool.other, stranger.one) == (len, theirs["transfer_hicache_one_layer_mla"])
    assert len(done.replaced) == len(_NAMES) + 2
    assert done.undo() == ()
    assert {name: getattr(engine.home, name) for name in _NAMES} == theirs
    assert pool.jit_one is theirs["transfer_hicache_one_layer_mla"]
    assert done.replaced == ()


def test_what_is_left_is_said(engine: Engine) -> None:
    """The functions of page_unified pools, and those that a newer engine has."""
    with adapter.install() as done:
        left = {name.rpartition(".")[2]: why for name, why in done.left.items()}
        assert "heads" in left["transfer_hicache_one_layer_page_unified_lf"]
        assert "no such" in left["can_use_something_new"]
        assert all("cannot import" in done.left[name] for name in POOLS)
        assert engine.home.can_use_something_new() == "theirs"
        told = str(done)
        assert "left" in told
        assert "replaced" in told
        assert done.version in told


def _others(*names: str) -> dict[str, Callable[..., Any]]:
    """Functions of another library, with the parameters of ours."""
    return {name: _function(name) for name in names}


@pytest.mark.parametrize("name", POOLS)
def test_pools_of_indexers_and_states(engine: Engine, name: str) -> None:
    """They call another library's functions: replaced in these pools, and nowhere else."""
    theirs = _others(*library_rows.__all__)
    pool = engine.module(name, **theirs)
    stranger = engine.module("sglang.srt.mem_cache.pool_host.unified", **theirs)
    library = engine.module("sglang.library", **theirs)
    with adapter.install() as done:
        for one in theirs:
            assert getattr(pool, one) is getattr(adapter, one)
            assert getattr(stranger, one) is getattr(library, one) is theirs[one]
        assert "no host pool holds" in done.left[f"{stranger.__name__}.transfer_kv_all_layer_mla"]
    assert {one: getattr(pool, one) for one in theirs} == theirs


def test_why_transfers_of_pools_are_left(engine: Engine) -> None:
    """Each that a pool calls and kvferry has not is named, with the reason."""
    names = {
        "transfer_kv_direct": "direct I/O",
        "transfer_kv_all_layer_lf_ph": "page_head",
        "transfer_cache_dsv4_mla": "DeepSeek V4",
        "transfer_kv_all_layer": "HiCache's own functions",
    }
    engine.module(POOLS[0], **dict.fromkeys(names, len))
    engine.module("sglang.srt.mem_cache.pool_host.mha", **dict.fromkeys(names, len))
    with adapter.install() as done:
        for name, why in names.items():
            for module in (POOLS[0], "sglang.srt.mem_cache.pool_host.mha"):
                assert why in done.left[f"{module}.{name}"]


def test_twice_is_once(engine: Engine) -> None:
    """The second finds nothing to replace, and undoing it changes nothing."""
    with adapter.install():
        again = adapter.install()
        assert again.replaced == ()
        again.undo()
        name = "transfer_hicache_one_layer"
        assert getattr(engine.home, name) is getattr(adapter, name)


def test_what_somebody_else_has_replaced_since_stays(engine: Engine) -> None:
    """Undoing tells of it."""
    done = adapter.install()
    engine.home.transfer_hicache_one_layer = len
    (kept,) = done.undo()
    assert kept.name == "transfer_hicache_one_layer"
    assert engine.home.transfer_hicache_one_layer is len


def test_a_function_that_takes_more_stops_it(engine: Engine) -> None:
    """A parameter of a newer engine must not be passed over: nothing is replaced."""
    before = dict(vars(engine.home))
    new = lambda cache_dst, colour: None  # noqa: E731, ARG005
    engine.home.transfer_hicache_one_layer_mla = before["transfer_hicache_one_layer_mla"] = new
    with pytest.raises(BackendInterfaceError, match="colour"):
        adapter.install()
    assert vars(engine.home) == before


@pytest.mark.parametrize("version", ["0.4.9", "0.6.0", "1.5.0"])
def test_other_series_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """With the version, and what to do."""
    engine = Engine(monkeypatch, HOMES[1], version)
    with pytest.raises(MissingDependencyError, match=version):
        adapter.install()
    assert engine.home.transfer_hicache_one_layer() == "theirs"


def test_as_a_plug_in_it_stops_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that is not known keeps its functions, and the log says so."""
    engine = Engine(monkeypatch, HOMES[1], "0.6.0")
    adapter.install_as_plugin()
    assert "0.6.0" in caplog.text
    assert engine.home.transfer_hicache_one_layer() == "theirs"
    engine = Engine(monkeypatch, HOMES[1], "0.5.23")
    adapter.install_as_plugin()
    assert engine.home.transfer_hicache_one_layer is adapter.transfer_hicache_one_layer


def test_an_engine_without_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have moved again: it is said where they were looked for."""
    Engine(monkeypatch, "sglang.somewhere", "0.5.99")
    with pytest.raises(BackendInterfaceError, match="neither"):
        adapter.install()

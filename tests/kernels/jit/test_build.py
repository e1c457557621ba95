"""From source to cubin: hits open no compiler, and many processes at once get the same bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kernels.jit.conftest import FakeBindings

import kvferry
from kvferry.errors import CompileError, DriverTooOldError, KernelSourceError
from kvferry.kernels.jit import (
    CubinCache,
    CubinOrigin,
    Driver,
    Header,
    KernelLoader,
    KernelSource,
    cubin_for,
    installed_compiler,
)

_SOURCE_FOLDER = Path(kvferry.__file__).parents[1]

# Arguments: the cache's folder, the unit as JSON. Says that it is ready, waits until its input is
# closed, and prints what it got.
_CHILD = """
import hashlib, json, os, pathlib, sys
from kvferry.kernels.jit import CubinCache, Header, KernelSource, cubin_for
folder, unit = sys.argv[1:]
name, text, headers, defines = json.loads(unit)
source = KernelSource(name, text, tuple(Header(*h) for h in headers),
                      tuple(tuple(d) for d in defines))
print("ready", flush=True)
sys.stdin.read()
cache = CubinCache(pathlib.Path(folder))
cubin = cubin_for(source, "sm_90", cache)
maps = pathlib.Path("/proc/self/maps").read_text()
print(json.dumps({
    "origin": cubin.origin, "key": cubin.key, "damaged": cache.counts.damaged,
    "image": hashlib.sha256(cubin.image).hexdigest(),
    "module": any(name.startswith("cuda") for name in sys.modules), "library": "libnvrtc" in maps,
}))
"""


@contextlib.contextmanager
def _children(
    count: int, folder: Path, source: KernelSource
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are about to ask for the cubin of `source`, each in another directory."""
    unit = json.dumps(dataclasses.astuple(source))
    started = []
    try:
        for number in range(count):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", _CHILD, str(folder), unit],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=("/", folder.parent)[number % 2],
                    env={
                        **os.environ,
                        "PYTHONPATH": str(_SOURCE_FOLDER),
                        "PYTHONHASHSEED": str(number),
                    },
                )
            )
        for child in started:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        yield started
    finally:
        for child in started:
            child.kill()
            child.wait(timeout=60)
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()


def _let_go(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.close()


def _said(child: subprocess.Popen[str]) -> dict[str, object]:
    """What a child printed, once it has ended well."""
    assert child.stdout is not None
    line = child.stdout.read()
    assert child.wait(timeout=60) == 0
    said: dict[str, object] = json.loads(line)
    return said


def _run(folder: Path, source: KernelSource) -> dict[str, object]:
    with _children(1, folder, source) as (child,):
        _let_go(child)
        return _said(child)


def test_a_hit_opens_no_compiler(tmp_path: Path, tiny: KernelSource) -> None:
    """The process that finds its cubin loads neither the bindings nor the library; one that does
    not find it loads both, so the check can fail."""
    built, found = _run(tmp_path, tiny), _run(tmp_path, tiny)
    assert (built["origin"], built["module"], built["library"]) == ("compiler", True, True)
    assert (found["origin"], found["module"], found["library"]) == ("cache", False, False)
    assert found["image"] == built["image"]


def test_sixteen_processes_at_once_a_third_of_them_killed(
    tmp_path: Path, tiny: KernelSource
) -> None:
    """All survivors get the same bytes, and so does whoever comes later; no file is half."""
    folder = tmp_path / "cache"
    dice = random.Random(31347)
    victims = set(dice.sample(range(16), 5))
    moment = threading.Event()
    with _children(16, folder, tiny) as started:
        for child in started:
            _let_go(child)
        for number in victims:
            # A random moment in the work of the victim; nothing depends on when it is.
            moment.wait(dice.uniform(0, 0.05))
            started[number].kill()
        said = [_said(child) for n, child in enumerate(started) if n not in victims]
        killed = [started[number].wait(timeout=60) for number in victims]
    # One that was done before its turn came is no victim.
    assert all(code in (0, -signal.SIGKILL) for code in killed)
    assert len({(one["key"], one["image"]) for one in said}) == 1
    assert not any(one["damaged"] for one in said)
    later = _run(folder, tiny)
    assert later["origin"] == "cache"
    assert later["image"] == said[0]["image"]
    assert [path.name for path in folder.iterdir() if path.suffix == ".cubin"] == [
        f"{later['key']}.cubin"
    ]


_CONTEND = """
import pathlib, random, sys
from kvferry.kernels.jit import CubinCache
folder, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
key, cubin, dice = "ab" * 32, bytes(range(256)) * 64, random.Random(seed)
path = folder / f"{key}.cubin"
print("ready", flush=True)
sys.stdin.read()
cache = CubinCache(folder)
for _ in range(60):
    what = dice.randrange(4)
    if what == 0: cache.put(key, cubin)
    elif what == 1:
        try:
            with path.open("r+b") as file: file.truncate(dice.randrange(9000))
        except FileNotFoundError: pass
    elif cache.get(key) not in (None, cubin): sys.exit("wrong bytes")
if cache.reason: sys.exit(cache.reason)
"""


def test_processes_that_store_read_and_damage_one_file(tmp_path: Path) -> None:
    """Whatever they do to each other's file, each reads the exact bytes or none."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _CONTEND, str(tmp_path), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_SOURCE_FOLDER)},
        )
        for seed in range(8)
    ]
    try:
        for child in started:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        ends = [child.communicate(timeout=60) for child in started]
        assert [(child.returncode, end[1][-200:] if child.returncode else "")
                for child, end in zip(started, ends, strict=True)] == [(0, "")] * 8  # fmt: skip
    finally:
        for child in started:
            child.kill()
            child.wait(timeout=60)
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


def test_a_changed_header_builds_anew(tmp_path: Path, tiny: KernelSource) -> None:
    """A kernel of yesterday's headers is never taken for today's; going back finds the old one."""
    cache = CubinCache(tmp_path)
    changed = dataclasses.replace(tiny, headers=(Header("amount.cuh", "#define AMOUNT 4\n"),))
    first, second = cubin_for(tiny, "sm_90", cache), cubin_for(changed, "sm_90", cache)
    assert (first.origin, second.origin) == (CubinOrigin.COMPILER, CubinOrigin.COMPILER)
    assert first.image != second.image
    again = cubin_for(tiny, "sm_90", cache)
    assert (again.origin, again.image) == (CubinOrigin.CACHE, first.image)


def test_a_damaged_cubin_is_built_again_once(tmp_path: Path, tiny: KernelSource) -> None:
    """The next process finds a sound one."""
    built = cubin_for(tiny, "sm_90", CubinCache(tmp_path))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    cache = CubinCache(tmp_path)
    assert cubin_for(tiny, "sm_90", cache) == built
    assert cubin_for(tiny, "sm_90", cache).origin is CubinOrigin.CACHE
    assert (cache.counts.damaged, cache.counts.stored) == (1, 1)


def test_without_any_folder_it_still_builds(
    tmp_path: Path, tiny: KernelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is there; only the next process has to build it again."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    cache = CubinCache(None)
    built = cubin_for(tiny, "sm_90", cache)
    assert hashlib.sha256(built.image).hexdigest() == _run(tmp_path, tiny)["image"]
    assert cache.location is None


def test_a_failed_build_leaves_nothing(tmp_path: Path, tiny: KernelSource) -> None:
    """An error is not cached: it is raised each time, and no file appears."""
    wrong = dataclasses.replace(tiny, text="no code")
    cache = CubinCache(tmp_path)
    for _ in range(2):
        with pytest.raises(CompileError):
            cubin_for(wrong, "sm_90", cache)
    assert list(tmp_path.iterdir()) == []


def test_a_unit_is_loaded_once_a_gpu(
    tmp_path: Path, tiny: KernelSource, driver: Driver, bindings: FakeBindings
) -> None:
    """The second load of a unit on the same GPU asks neither disk nor driver."""
    loader = KernelLoader(driver, CubinCache(tmp_path))
    module = loader.load(tiny, 0)
    assert loader.load(tiny, 0) is module
    assert loader.load(tiny, 1) is not module
    images = [call[1] for call in bindings.calls if call[0] == "cuModuleLoadData"]
    assert images == [cubin_for(tiny, "sm_90", CubinCache(tmp_path)).image] * 2
    assert loader.cache.counts.hits == 1
    loader.close()
    assert len([call for call in bindings.calls if call[0] == "cuModuleUnload"]) == 2
    assert bindings.depth == 0


def test_a_gpu_that_is_too_old(
    tmp_path: Path, tiny: KernelSource, driver: Driver, bindings: FakeBindings
) -> None:
    """It is refused before anything is compiled."""
    bindings.capability = (7, 5)
    with pytest.raises(KernelSourceError, match="sm_75"):
        KernelLoader(driver, CubinCache(tmp_path)).load(tiny, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_newer_than_the_driver(
    tmp_path: Path, tiny: KernelSource, bindings: FakeBindings
) -> None:
    """Its cubins are refused before the driver sees one."""
    found = installed_compiler()
    bindings.version = (found.release[0] - 1) * 1000
    loader = KernelLoader(Driver(bindings, "12.9.4"), CubinCache(tmp_path))
    with pytest.raises(DriverTooOldError, match=f"compiled by CUDA {found.release[0]}"):
        loader.load(tiny, 0)
    assert not [call for call in bindings.calls if call[0] == "cuModuleLoadData"]

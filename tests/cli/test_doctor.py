"""``kvferry doctor``: what it makes of readings, of broken drivers, and of a GPU that is a stub."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stub_driver import build_driver

from kvferry.cli import main
from kvferry.cli.doctor.diagnosis import Check, Diagnosis, Status, diagnose
from kvferry.cli.doctor.gpu_probe import _try_cache
from kvferry.cli.doctor.gpu_report import GpuReading, GpuReport, ask_gpus, read_report
from kvferry.cli.doctor.host_reading import HostReading, Slot, parse_list, read_host
from kvferry.cli.doctor.transfer_probe import round_trip_error
from kvferry.env import _CHECKS, VARIABLES
from kvferry.errors import CubinCacheError
from kvferry.kernels.jit import CubinCache
from kvferry.memory import MemoryReading
from kvferry.testing import GuardedBuffer
from kvferry.transfer.paths import CpuPath

GIB = 1 << 30

_HOST: dict[str, Any] = {
    "memory": MemoryReading(total_bytes=64 * GIB, available_bytes=60 * GIB),
    "huge_page_mode": "madvise",
    "nodes": (0,),
    "own_nodes": (0,),
    "own_memory_nodes": (0,),
    "slots": (Slot(node=0, gt_s=32.0, lanes=16),),
    "driver_release": "580.159.04",
    "cpu_paths": ("cpu", "cpu_numpy"),
    "has_compiled_path": True,
}
_GPU: dict[str, Any] = {
    "index": 0,
    "name": "NVIDIA H200",
    "capability": (9, 0),
    "total_bytes": 139 * GIB,
    "bus_id": "0000:ab:00.0",
    "h2d_gb_s": 55.5,
    "d2h_gb_s": 55.4,
    "profile": "calibrated",
    "profile_file": "/home/me/.cache/kvferry/profile-1.json",
    "profile_age_secs": 90_000.0,
    "tried_paths": {"flat": "", "realign": "", "grouped": ""},
}
_REPORT: dict[str, Any] = {
    "step": "ending",
    "driver": (13, 0),
    "compiler": "nvidia-cuda-nvrtc 13.0.88",
    "cache_folder": "/home/me/.cache/kvferry",
    "paths": ("flat", "realign", "grouped"),
}


def _diagnosed(
    *, host: dict[str, Any] | None = None, gpu: dict[str, Any] | None = None, **report: Any
) -> Diagnosis:
    """A sound machine with one GPU, but for what is given."""
    report.setdefault("gpus", (GpuReading(**{**_GPU, **(gpu or {})}),))
    return diagnose(HostReading(**{**_HOST, **(host or {})}), GpuReport(**{**_REPORT, **report}))


def _check(diagnosis: Diagnosis, name: str) -> Check:
    return next(check for check in diagnosis.checks if check.name == name)


_NO_GPU: dict[str, Any] = {"driver": None, "gpus": (), "paths": ()}


def test_a_sound_machine_has_nothing_to_be_told() -> None:
    """Every check is ok, has found something, and has no advice; names are unique."""
    diagnosis = _diagnosed()
    assert diagnosis.some_path_works
    assert {check.status for check in diagnosis.checks} == {Status.OK}
    assert all(check.found and not check.advice for check in diagnosis.checks)
    names = [check.name for check in diagnosis.checks]
    assert names == [
        "environment", "driver", "gpu 0", "compiler", "kernel_cache", "link 0", "profile 0", "numa",
        "host_memory", "memlock", "huge_pages", "cpu_paths", "gpu_paths",
    ]  # fmt: skip
    assert _check(diagnosis, "driver").found == "NVIDIA driver 580.159.04, CUDA 13.0"
    assert "55.5 GB/s to the GPU, 55.4 GB/s from it" in _check(diagnosis, "link 0").found
    assert "at most 63.0" in _check(diagnosis, "link 0").found
    assert _check(diagnosis, "gpu_paths").found == "flat, realign, grouped on GPU 0"
    assert _check(diagnosis, "profile 0").found == f"calibrated, {_GPU['profile_file']}, 1 day old"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "less than a minute old"),
        (61.0, "1 minute old"),
        (7_300.0, "2 hours old"),
        (864_000.0, "10 days old"),
    ],
)
def test_the_age_of_a_profile_is_told(seconds: float, said: str) -> None:
    """In the largest unit that it fills once."""
    check = _check(_diagnosed(gpu={"profile_age_secs": seconds}), "profile 0")
    assert check.found.endswith(f", {said}")


def test_without_a_gpu_the_cpu_paths_do() -> None:
    """No driver is a warning; so is no compiler, as nobody needs it; the verdict is good."""
    diagnosis = _diagnosed(
        host={"driver_release": None, "slots": ()},
        compiler=None,
        compiler_error="pip install 'cuda-bindings==13.*'",
        **_NO_GPU,
    )
    assert diagnosis.some_path_works
    assert {check.status for check in diagnosis.checks} == {Status.OK, Status.WARN}
    assert "no libcuda.so.1" in _check(diagnosis, "driver").found
    assert "CPU paths" in _check(diagnosis, "driver").advice
    assert _check(diagnosis, "compiler") == Check(
        "compiler", Status.WARN, "none", "pip install 'cuda-bindings==13.*'"
    )
    assert _check(diagnosis, "gpu_paths").found == "none: there is no GPU to use"


@pytest.mark.parametrize(
    ("changes", "name", "status", "said"),
    [
        ({"host": {"driver_release": "580.1"}, **_NO_GPU}, "driver", "fail", "no libcuda.so.1"),
        ({"driver_error": "pip install it", "gpus": (), "paths": ()}, "driver", "fail", "pip"),
        ({"gpus": (), "paths": ()}, "gpus", "warn", "CUDA_VISIBLE_DEVICES"),
        ({"gpu": {"capability": (7, 5)}}, "gpu 0", "fail", "need 8.0"),
        ({"gpu": {"error": "busy"}}, "gpu 0", "fail", "cannot be used: busy"),
        ({"compiler_error": "no NVRTC"}, "compiler", "fail", "no NVRTC"),
        ({"driver": (12, 8)}, "compiler", "fail", "nvidia-cuda-nvrtc-cu12>=12.9,<13"),
        ({"cache_error": "everybody may write"}, "kernel_cache", "fail", "everybody"),
        ({"cache_reason": "/x: read-only"}, "kernel_cache", "warn", "KVFERRY_CACHE_DIR"),
        ({"cache_folder": None, "cache_reason": "full"}, "kernel_cache", "warn", "memory only"),
        ({"gpu": {"link_error": "bytes changed"}}, "link 0", "fail", "bytes changed"),
        ({"gpu": {"link_error": "bytes changed"}}, "gpu_paths", "fail", "bytes changed"),
        ({"gpu": {"link_skipped": "only 5 bytes"}}, "link 0", "warn", "only 5 bytes"),
        ({"gpu": {"h2d_gb_s": 26.0}}, "link 0", "warn", "slower or narrower"),
        ({"gpu": {"profile": "built-in", "profile_file": None}}, "profile 0", "warn",
         "built-in run kvferry calibrate --device 0"),
        ({"gpu": {"profile": "built-in", "profile_file": None, "profile_reason": "/x: damaged"}},
         "profile 0", "warn", "built-in; another was passed over: /x: damaged"),
        ({"gpu": {"unmeasured": ("direct.load",)}}, "profile 0", "warn", "up before direct.load"),
        ({"gpu": {"profile": None}}, "profile 0", "warn", "not reached"),
        ({"gpu": {"profile_error": "relative"}}, "profile 0", "fail", "relative"),
        ({"gpu": {"kernel_error": "no alias"}}, "gpu_paths", "fail", "GPU 0: no alias"),
        ({"gpu": {"tried_paths": {}}}, "gpu_paths", "fail", "GPU 0: flat: it was not reached"),
        ({"gpu": {"tried_paths": {"flat": ""}}}, "gpu_paths", "warn", "flat on GPU 0 GPU 0: rea"),
        ({"gpu": {"tried_paths": {"flat": "no", "realign": "", "grouped": ""}}}, "gpu_paths",
         "warn", "realign, grouped on GPU 0 GPU 0: flat: no"),
        ({"paths": ()}, "gpu_paths", "warn", "KVFERRY_DISABLE_PATHS"),
        ({"paths": (), "paths_error": "x is no path"}, "gpu_paths", "fail", "x is no path"),
        ({"host": {"huge_page_mode": "never"}}, "huge_pages", "warn", "echo madvise"),
        ({"host": {"huge_page_mode": None}}, "huge_pages", "ok", "unknown"),
        ({"host": {"memory": None, "memory_error": "no meminfo"}}, "host_memory", "fail", "memi"),
        ({"host": {"memory": None, "memory_error": "no meminfo"}}, "memlock", "warn", "memi"),
        ({"host": {"has_compiled_path": False, "cpu_paths": ("cpu_numpy",)}}, "cpu_paths", "warn",
         "C compiler"),
        ({"host": {"cpu_paths": ()}}, "cpu_paths", "warn", "KVFERRY_DISABLE_PATHS"),
        ({"host": {"cpu_paths": (), "cpu_paths_error": "x is no path"}}, "cpu_paths", "fail",
         "x is no path"),
        ({"host": {"nodes": ()}}, "numa", "ok", "names no nodes"),
    ],
)  # fmt: skip
def test_each_fault_is_told_by_its_check(
    changes: dict[str, Any], name: str, status: str, said: str
) -> None:
    """The check it concerns has the status, and words that say what to do."""
    check = _check(_diagnosed(**changes), name)
    assert check.status == status
    assert said in f"{check.found} {check.advice}"
    assert check.status is Status.OK or check.advice


def test_small_lock_limit_is_shown_and_is_no_failure() -> None:
    """The numbers, how to raise it, and that memory pinned for a GPU does not count."""
    memory = MemoryReading(
        total_bytes=64 * GIB,
        available_bytes=60 * GIB,
        memlock_limit_bytes=65536,
        memlock_used_bytes=4096,
    )
    check = _check(_diagnosed(host={"memory": memory}), "memlock")
    assert check.status is Status.WARN
    assert "65536 B" in check.found
    assert "4096 B" in check.found
    assert "ulimit -l" in check.advice
    assert "not counted" in check.advice


def test_little_memory_is_told_with_the_budget_s_words() -> None:
    """A machine that has no room for a pool of 1 GiB gets the verdict's message."""
    memory = MemoryReading(total_bytes=GIB, available_bytes=GIB // 2)
    check = _check(_diagnosed(host={"memory": memory}), "host_memory")
    assert check.status is Status.WARN
    assert "1.00 GiB (1073741824 B) of host memory were asked for" in check.advice


@pytest.mark.parametrize(
    ("node", "own", "memory", "status", "said"),
    [
        (1, (1,), (1,), "ok", "GPU 0 on node 1"),
        (1, (0,), (0, 1), "warn", "--cpunodebind=1 --membind=1"),
        (1, (0, 1), (0,), "warn", "no memory of node 1"),
        (1, (0, 1), (0, 1), "warn", "--cpunodebind=1"),
        (None, (0, 1), (0, 1), "warn", "node unknown"),
        (None, (0,), (0,), "ok", "node unknown"),
    ],
)
def test_numa(
    node: int | None, own: tuple[int, ...], memory: tuple[int, ...], status: str, said: str
) -> None:
    """On two nodes the process should be bound to that of its GPU; one node needs nothing."""
    host = {
        "nodes": (0, 1),
        "own_nodes": own,
        "own_memory_nodes": memory,
        "slots": (Slot(node=node),),
    }
    check = _check(_diagnosed(host=host), "numa")
    assert check.status == status
    assert said in f"{check.found} {check.advice}"


def test_one_good_gpu_of_two_is_named() -> None:
    """The paths are listed for the GPU that works, with what is wrong with the other."""
    gpus = (GpuReading(**_GPU), GpuReading(**{**_GPU, "index": 1, "kernel_error": "no alias"}))
    diagnosis = _diagnosed(gpus=gpus)
    check = _check(diagnosis, "gpu_paths")
    assert check == Check(
        "gpu_paths", Status.WARN, "flat, realign, grouped on GPU 0", "GPU 1: no alias"
    )
    # The second GPU's slot was not read.
    assert _check(diagnosis, "link 1").status is Status.OK


def test_no_path_at_all_is_the_only_bad_verdict() -> None:
    """Everything else may fail; without CPU paths a working GPU still counts, a broken one not."""
    assert _diagnosed(host={"cpu_paths": ()}).some_path_works
    assert _diagnosed(gpu={"kernel_error": "no alias"}).some_path_works
    broken = _diagnosed(host={"cpu_paths": ()}, gpu={"kernel_error": "no alias"})
    assert not broken.some_path_works
    assert _check(broken, "cpu_paths").status is Status.FAIL
    assert not _diagnosed(host={"cpu_paths": ()}, paths=()).some_path_works


def test_a_path_that_was_tried_and_failed_does_not_work() -> None:
    """A GPU that runs a kernel and carries no transfer is no GPU that works."""
    failed = dict.fromkeys(("flat", "realign", "grouped"), "does not compile")
    diagnosis = _diagnosed(host={"cpu_paths": ()}, gpu={"tried_paths": failed})
    assert not diagnosis.some_path_works
    assert _check(diagnosis, "gpu_paths") == Check(
        "gpu_paths",
        Status.FAIL,
        "none: no GPU carries a transfer, right to the last bit",
        "GPU 0: flat: does not compile",
    )


def test_a_path_is_tried_with_real_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right on a path that works; wrong bytes, a fault and an absent path are told."""
    assert round_trip_error("cpu_numpy", GuardedBuffer) == ""
    assert "not to be had" in round_trip_error("flat", GuardedBuffer)

    def does_nothing(move: Any, *_: Any, **__: Any) -> Any:
        return np.ones(len(move.host_slots), dtype=np.bool_)

    monkeypatch.setattr("kvferry.transfer.paths._PORTABLE", CpuPath("cpu_numpy", does_nothing))
    assert "host pool after the store" in round_trip_error("cpu_numpy", GuardedBuffer)


def test_last_whole_line_counts() -> None:
    """What a child knew before it died is used; noise and cut lines are passed over."""
    first = '{"step": "first", "driver": null, "gpus": [], "paths": []}'
    second = json.dumps(
        {
            "step": "second",
            "driver": [13, 2],
            "gpus": [{**_GPU, "capability": [9, 0]}],
            "paths": ["flat"],
        }
    )
    report = read_report([first, second, "noise", "[1]", second[:-5]], "gone")
    assert report == GpuReport(
        step="second", driver=(13, 2), gpus=(GpuReading(**_GPU),), paths=("flat",), ended="gone"
    )
    assert read_report(["noise"], None).ended == "it said nothing"


_TELLS = (
    "import json; print(json.dumps({'step': 'starting', 'driver': [13, 0], 'gpus': [], "
    "'paths': []}), flush=True)\n"
)


@pytest.mark.parametrize(
    ("program", "deadline_secs", "ended"),
    [
        ("import threading; threading.Event().wait()", 3, "did not end within 3 s"),
        ("import os; os.abort()", 60, "signal 6"),
        ("raise SystemExit(3)", 60, "status 3"),
        ("raise ValueError('so it is')", 60, "status 1: ValueError: so it is"),
    ],
)
def test_a_child_that_fails_does_not_take_its_report_along(
    program: str, deadline_secs: float, ended: str
) -> None:
    """Hang, crash, exit and exception: each is named, and the line before it still counts."""
    report = ask_gpus(program=_TELLS + program, deadline_secs=deadline_secs)
    assert report.ended is not None
    assert ended in report.ended
    assert (report.step, report.driver) == ("starting", (13, 0))
    check = _check(diagnose(HostReading(**_HOST), report), "driver")
    assert check.status is Status.FAIL
    assert "while starting" in check.found
    assert "CPU paths" in check.advice
    paths = _check(diagnose(HostReading(**_HOST), report), "gpu_paths")
    assert (paths.status, paths.found) == (Status.FAIL, "none: not reached")


def _machine(root: Path) -> tuple[Path, Path]:
    """A machine of two nodes with a GPU on the second, as files of /proc and /sys."""
    files = {
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 600 kB\nHugePages_Free: 3\n"
        "HugePages_Rsvd: 1\nHugepagesize: 2048 kB\n",
        "proc/self/status": "CapEff: 0\nMems_allowed_list:\t0-1\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
        "580.95.05  Release Build\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/devices/system/node/online": "0-1\n",
        "sys/devices/system/node/node0/cpulist": "\n",
        "sys/devices/system/node/node1/cpulist": "0-4095\n",
        "sys/bus/pci/devices/0000:ab:00.0/numa_node": "1\n",
        "sys/bus/pci/devices/0000:ab:00.0/max_link_speed": "32.0 GT/s PCIe\n",
        "sys/bus/pci/devices/0000:ab:00.0/max_link_width": "16\n",
        "sys/bus/pci/devices/0000:cd:00.0/numa_node": "-1\n",
        "sys/bus/pci/devices/0000:cd:00.0/max_link_speed": "Unknown\n",
        "sys/bus/pci/devices/0000:cd:00.0/max_link_width": "255\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "sys"


def test_the_machine_is_read_from_the_kernel_s_files(tmp_path: Path) -> None:
    """Memory, huge pages, nodes, slots and driver release; what is unknown is None."""
    proc, sys_folder = _machine(tmp_path)
    ids = ["0000:ab:00.0", "0000:cd:00.0", "0000:ef:00.0"]
    host = read_host(bus_ids=ids, proc_root=proc, sys_root=sys_folder)
    assert host.memory is not None
    assert host.memory.available_bytes == 600 * 1024
    assert host.memory.huge_free_bytes == 2 * 2048 * 1024
    assert host.huge_page_mode == "madvise"
    assert host.driver_release == "580.95.05"
    assert (host.nodes, host.own_nodes, host.own_memory_nodes) == ((0, 1), (1,), (0, 1))
    assert host.slots == (Slot(node=1, gt_s=32.0, lanes=16), Slot(), Slot())
    assert "cpu_numpy" in host.cpu_paths


def test_a_machine_that_says_nothing_is_diagnosed_too(tmp_path: Path) -> None:
    """Without any of the files there are readings of None, and checks all the same."""
    host = read_host(bus_ids=["0000:ab:00.0"], proc_root=tmp_path, sys_root=tmp_path)
    assert host.memory is None
    assert host.memory_error is not None
    assert (host.nodes, host.driver_release, host.slots) == ((), None, (Slot(),))
    assert _check(diagnose(host, GpuReport(**_REPORT)), "host_memory").status is Status.FAIL


def test_lists_of_the_kernel() -> None:
    """Ranges, single numbers, both, and nothing."""
    assert parse_list("0-2,5\n") == (0, 1, 2, 5)
    assert parse_list("7") == (7,)
    assert parse_list("\n") == ()


def _printed(capsys: pytest.CaptureFixture[str], status: int) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == status
    out, err = capsys.readouterr()
    assert err == ""
    told = json.loads(out)
    assert set(told) == {"ok", "checks"}
    assert told["ok"] is (status == 0)
    for check in told["checks"]:
        assert list(check) == ["name", "status", "found", "advice"]
        assert check["status"] in ("ok", "warn", "fail")
        assert check["found"]
        assert check["status"] == "ok" or check["advice"]
    return {check["name"]: (check["status"], check) for check in told["checks"]}


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for kernels that is this test's alone."""
    folder = tmp_path / "cubins"
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(folder))
    return folder


def test_json_on_this_machine(capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    """Whatever there is here, the CPU paths work, the object is whole and the status is 0."""
    told = _printed(capsys, 0)
    assert told["cpu_paths"][0] in ("ok", "warn")
    assert told["kernel_cache"][1]["found"] == str(own_cache)


def test_the_kernel_cache_is_tried_for_real(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry is written, read and removed; each of the three that fails is told."""
    _try_cache(CubinCache(own_cache))
    assert list(own_cache.iterdir()) == []
    cache = CubinCache(own_cache)
    monkeypatch.setattr(cache, "get", lambda _: None)
    with pytest.raises(CubinCacheError, match="was not there when it was read"):
        _try_cache(cache)

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with pytest.raises(CubinCacheError, match="cannot be removed"):
            _try_cache(CubinCache(own_cache))


def test_a_kernel_cache_that_only_looks_writable_is_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bytes do not stay there is a warning, whatever the folder's mode says."""
    # Root may write there by its mode, and the kernel takes no files.
    monkeypatch.setenv("KVFERRY_CACHE_DIR", "/proc/self")
    status, check = _printed(capsys, 0)["kernel_cache"]
    assert status == "warn"
    assert "/proc/self" in check["found"]


@pytest.mark.gpu
def test_a_real_gpu_works(capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    """With a GPU everything that a transfer needs was done on it, and the link was measured."""
    told = _printed(capsys, 0)
    for name in ("driver", "gpu 0", "compiler", "kernel_cache", "gpu_paths"):
        assert told[name][0] == "ok", told[name]
    assert told["link 0"][0] in ("ok", "warn")
    assert "GB/s to the GPU" in told["link 0"][1]["found"]


def test_bad_settings_are_findings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With variables that kvferry refuses nothing works: status 1, and each is named."""
    monkeypatch.setenv("KVFERRY_CACHE_DIR", "not/absolute")
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "cpu,nonsense")
    told = _printed(capsys, 1)
    status, check = told["environment"]
    assert (status, check["found"]) == (
        "fail",
        "KVFERRY_DISABLE_PATHS, KVFERRY_CACHE_DIR: not accepted",
    )
    assert "nonsense is no path" in check["advice"]
    assert "nonsense" in told["cpu_paths"][1]["advice"]
    assert "not/absolute" in told["kernel_cache"][1]["advice"]
    assert main(["doctor"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("No transfer path works here. Failed: environment, kernel_cache, ")


def test_a_bad_variable_that_nothing_here_needs_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    """Paths work, and the status says all the same that something is wrong."""
    monkeypatch.setenv("KVFERRY_DEBUG", "yes")
    told = _printed(capsys, 1)
    assert told["environment"][1]["advice"] == "KVFERRY_DEBUG='yes' must be 0 or 1"
    assert main(["doctor"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "kvferry works here in part. Failed: environment."


def test_a_setting_that_is_not_accepted_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    """A variable that begins like ours and is none; others are checked by `kvferry config`."""
    monkeypatch.setenv("KVFERRY_NONSENSE", "1")
    told = _printed(capsys, 1)
    assert told["environment"][1]["found"] == "settings: not accepted"
    assert "KVFERRY_NONSENSE is no variable" in told["environment"][1]["advice"]


def test_every_variable_is_checked() -> None:
    """None that kvferry reads is left out."""
    assert set(_CHECKS) == {variable.name for variable in VARIABLES}


@pytest.fixture(scope="module")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stub driver in it."""
    folder = tmp_path_factory.mktemp("stub")
    build_driver(Path(__file__).with_name("stub_gpu.c"), folder)
    return folder


_LIST_PATHS = "from kvferry.transfer import available_gpu_paths; print(available_gpu_paths())"


@pytest.mark.parametrize(
    ("fault", "status", "name", "said"),
    [
        # It runs the probe's kernel and has none of those that transfer.
        ("", "fail", "gpu_paths", "GPU 0: flat: the CUDA driver could not find kernel"),
        ("no_device", "fail", "driver", "CUDA_ERROR_NO_DEVICE"),
        ("no_start", "fail", "driver", "CUDA_ERROR_OTHER (999)"),
        ("old", "fail", "gpu 0", "compute capability 7.5"),
        ("full", "warn", "link 0", "1048576 bytes are free"),
        ("no_register", "fail", "gpu_paths", "CUDA_ERROR_NOT_SUPPORTED"),
        ("corrupt", "fail", "link 0", "came back from the GPU changed"),
        ("lost_write", "fail", "gpu_paths", "did not arrive"),
        ("crash", "fail", "driver", "signal 6"),
    ],
)
def test_a_gpu_that_is_a_stub(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own_cache: Path,
    stub_folder: Path,
    fault: str,
    status: str,
    name: str,
    said: str,
) -> None:
    """Through the real bindings: registered, mapped, copied to, computed on; each fault is seen."""
    pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub_folder))
    monkeypatch.setenv("STUB_FAULT", fault)
    if fault == "no_start":  # an error that is neither "no device" nor "too old"
        ran = subprocess.run(
            [sys.executable, "-c", _LIST_PATHS], capture_output=True, text=True, check=True,
            timeout=60,
        )  # fmt: skip
        assert ran.stdout == "()\n"
    told = _printed(capsys, 1)
    assert told[name][0] == status
    assert said in f"{told[name][1]['found']} {told[name][1]['advice']}"
    if not fault:
        assert told["gpu 0"][1]["found"].endswith("at 0000:ab:00.0")
        assert "GB/s to the GPU" in told["link 0"][1]["found"]
        assert told["profile 0"][1]["found"] == "built-in"
        assert told["profile 0"][1]["advice"].startswith("run kvferry calibrate")
        assert told["driver"][0] == "ok"


def test_words(capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    """Without --json: a line a check, its advice below it, a verdict at the end, in 100 columns."""
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["ok", "environment"]
    assert "works here" in lines[-1]
    assert any(line.split()[1:2] == ["host_memory"] for line in lines)
    # Words that cannot be broken, such as paths, may be longer.
    assert all(len(line) <= 100 or " " not in line[20:].strip() for line in lines)

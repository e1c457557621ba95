"""What a process of its own found out about driver, compiler and GPUs.

A broken driver can hang or crash whoever calls it. So the calls are made in a child, which writes
down what it knows after each step and gets a deadline; what it knew until then still counts.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["DEADLINE_SECS", "GpuReading", "GpuReport", "ask_gpus", "read_report"]

DEADLINE_SECS = 60.0
# A killed process that is stuck inside the driver may never end; it is not waited for.
_KILL_SECS = 5.0

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kvferry.cli.doctor.gpu_probe import main; main()"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One GPU, and what came of using it."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    bus_id: str
    """As the kernel's folders under ``/sys/bus/pci/devices`` are called."""

    error: str | None = None
    """Why it could not be used at all."""
    kernel_error: str | None = None
    """Why a kernel could not be built and run on pinned host memory."""
    link_error: str | None = None
    """What went wrong with copies to and from it."""
    link_skipped: str | None = None
    """Why none were made."""
    h2d_gb_s: float | None = None
    """Payload of a pinned copy to the GPU, in 10^9 bytes a second."""
    d2h_gb_s: float | None = None
    profile: str | None = None
    """Where the figures of its link are from, ``built-in`` or ``calibrated``."""
    profile_file: str | None = None
    profile_age_secs: float | None = None
    profile_reason: str | None = None
    """Why they are built-in although there may be others."""
    unmeasured: tuple[str, ...] = ()
    """Which of them a calibration had no time for."""
    profile_error: str | None = None
    """Why nobody can tell."""
    tried_paths: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Each path that a small transfer was made on: what went wrong, or empty."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuReport:
    """Everything that needs driver, bindings or compiler. None: was not found, or not reached."""

    step: str = "started"
    """What it was doing last."""
    ended: str | None = None
    """Why it did not get there."""
    driver: tuple[int, int] | None = None
    """The newest CUDA that the driver runs."""
    driver_error: str | None = None
    """Why the driver cannot be used, also where there is none."""
    compiler: str | None = None
    """Package and version of the run-time compiler."""
    compiler_error: str | None = None
    cache_folder: str | None = None
    """Where compiled kernels are kept. None: nowhere."""
    cache_reason: str | None = None
    """Why that is not the folder that was asked for."""
    cache_error: str | None = None
    """Why no kernels may be kept at all."""
    paths: tuple[str, ...] = ()
    """The paths for GPU pools that are not switched off."""
    paths_error: str | None = None
    gpus: tuple[GpuReading, ...] = ()


def ask_gpus(*, program: str = _CHILD, deadline_secs: float = DEADLINE_SECS) -> GpuReport:
    """Run `program` in a child of this interpreter, and read what it wrote until the deadline."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
        try:
            child = subprocess.Popen(  # noqa: S603  # this interpreter, and a program of ours
                [sys.executable, "-c", program, json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=complaints,
            )
        except OSError as bad:
            return GpuReport(ended=f"no process could be started: {bad}")
        ended = _end_of(child, deadline_secs)
        output.seek(0)
        complaints.seek(0)
        if ended is not None:
            last = complaints.read().decode(errors="replace").strip().splitlines()[-1:]
            ended = f"{ended}: {last[0]}" if last else ended
        return read_report(output.read().decode(errors="replace").splitlines(), ended)


def read_report(lines: Sequence[str], ended: str | None) -> GpuReport:
    """The report in the last whole line, with `ended` put in."""
    for line in reversed(lines):
        try:
            told = json.loads(line)
        except ValueError:
            continue  # cut off in the middle, or not ours
        if isinstance(told, Mapping) and "step" in told:
            return _report(told, ended)
    return GpuReport(ended=ended or "it said nothing")


def _end_of(child: subprocess.Popen[bytes], deadline_secs: float) -> str | None:
    try:
        status = child.wait(deadline_secs)
    except subprocess.TimeoutExpired:
        child.kill()
        try:
            child.wait(_KILL_SECS)
        except subprocess.TimeoutExpired:
            return f"it did not end within {deadline_secs:.0f} s, and cannot be killed"
        return f"it did not end within {deadline_secs:.0f} s"
    if status < 0:
        return f"it was ended by signal {-status}"
    return f"it ended with status {status}" if status else None


def _report(told: Mapping[str, Any], ended: str | None) -> GpuReport:
    gpus = tuple(
        GpuReading(
            **{
                **gpu,
                "capability": _pair(gpu["capability"]),
                "unmeasured": tuple(gpu.get("unmeasured", ())),
            }
        )
        for gpu in told["gpus"]
    )
    driver = None if told["driver"] is None else _pair(told["driver"])
    paths = tuple(told["paths"])
    return GpuReport(**{**told, "driver": driver, "gpus": gpus, "paths": paths, "ended": ended})


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    return int(numbers[0]), int(numbers[1])

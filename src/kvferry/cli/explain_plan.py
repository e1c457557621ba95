"""``kvferry explain --plan``: the route of a transfer, in words and JSON, without a GPU."""

from __future__ import annotations

import argparse
import itertools
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvferry.cli.geometry_options import OF_A_MODEL, given_options, read_geometry
from kvferry.cli.json_text import json_text
from kvferry.cli.whole_number import whole_number
from kvferry.errors import ConfigError, DriverError, MissingDependencyError
from kvferry.types import Direction, Layout, Mover

if TYPE_CHECKING:
    from kvferry.geometry import Geometry
    from kvferry.transfer import DeviceProfile, RoutePreview

__all__ = ["OF_A_PLAN", "add_plan_options", "run_plan"]

OF_A_PLAN = (
    *("config", *OF_A_MODEL, "layers", "tokens", "device_run", "host_run", "host_layout"),
    *("direction", "staging_mib", "mover", "profile"),
)
"""Names of the arguments that go with ``--plan`` alone."""

_T = TypeVar("_T")

_WIDTH = 100
_HEAD = 11
_MOST_TOKENS = 1 << 40
_MOST_MIB = 1 << 20


def add_plan_options(parser: argparse._ActionsContainer) -> None:
    """Add what tells a transfer, but for its geometry. None: it was not given."""
    for name, metavar, what in (
        ("--layers", "L", "with --element-size: how many layers"),
        ("--tokens", "N", "how many move; whole pages do"),
        ("--device-run", "TOKENS", "tokens that keep neighbouring slots on the device (1)"),
        ("--host-run", "PAGES", "pages that keep neighbouring slots on the host (all)"),
        ("--staging-mib", "MIB", "device memory of each direction for staging (64)"),
    ):
        parser.add_argument(name, type=whole_number, metavar=metavar, help=what)
    parser.add_argument(
        "--host-layout", metavar="LAYOUT", help=f"{', '.join(Layout)} ({Layout.PAGE_MAJOR})"
    )
    parser.add_argument("--direction", metavar="WAY", help=f"{' or '.join(Direction)} (both)")
    parser.add_argument("--mover", metavar="MOVER", help=f"{' or '.join(Mover)} (the faster)")
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="figures of a device, as kvferry calibrate keeps or prints them (those of GPU 0 "
        "here, else the built-in ones)",
    )


class _Asked(NamedTuple):
    """A transfer, and what it is planned with."""

    geometry: Geometry
    tokens: int
    layout: Layout
    device_run: int
    profile: DeviceProfile
    profile_from: str


def run_plan(args: argparse.Namespace) -> int:
    """Print which mover carries a transfer, why, in which steps, and how long it takes."""
    from kvferry.transfer import preview_route

    geometry = _geometry(args)
    if args.tokens is None:
        raise ConfigError("--plan needs --tokens: how many move")
    tokens = _count(args, "tokens", 1, 1, _MOST_TOKENS)
    host_run = None if args.host_run is None else _count(args, "host_run", 1, 1, _MOST_TOKENS)
    staging_mib = _count(args, "staging_mib", 64, 0, _MOST_MIB)
    device_run = _count(args, "device_run", 1, 1, _MOST_TOKENS)
    layout = _member(Layout, "--host-layout", args.host_layout) or Layout.PAGE_MAJOR
    only = _member(Direction, "--direction", args.direction)
    mover = _member(Mover, "--mover", args.mover)
    asked = _Asked(geometry, tokens, layout, device_run, *_profile(args.profile))
    previews = [
        preview_route(
            geometry,
            direction,
            num_pages=-(-tokens // geometry.page_size),
            profile=asked.profile,
            host_run=host_run,
            device_run=device_run,
            host_layout=layout,
            staging_bytes=None if args.staging_mib is None else staging_mib << 20,
            mover=mover,
        )
        for direction in ([only] if only else Direction)
    ]
    if args.json:
        print(json_text(_described(asked, staging_mib << 20, previews)))
    else:
        print("\n".join(_told(asked, previews)))
    return 0


def _geometry(args: argparse.Namespace) -> Geometry:
    from kvferry.geometry import DEFAULT_PAGE_SIZE, Geometry, Plane

    by_size = args.element_size is not None or args.layers is not None
    if args.config is not None and by_size:
        raise ConfigError("give CONFIG, or --element-size with --layers; not both")
    if args.config is not None:
        return read_geometry(args)[0]
    if args.element_size is None or args.layers is None:
        raise ConfigError("--plan needs a geometry: CONFIG, or --element-size with --layers")
    misplaced = [_flag(name) for name in given_options(args, OF_A_MODEL)]
    if misplaced:
        raise ConfigError(f"{', '.join(misplaced)}: with a model's CONFIG only")
    page_size = DEFAULT_PAGE_SIZE if args.page_size is None else args.page_size
    plane = Plane(name="kv", num_layers=args.layers, element_size=args.element_size)
    return Geometry(planes=(plane,), page_size=page_size)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _count(args: argparse.Namespace, name: str, default: int, low: int, high: int) -> int:
    value = default if getattr(args, name) is None else int(getattr(args, name))
    if not low <= value <= high:
        raise ConfigError(f"{_flag(name)} must be from {low} to {high:,}, not {value:,}")
    return value


def _member(kind: Any, flag: str, given: str | None) -> Any:
    if given is not None and given not in list(kind):
        raise ConfigError(f"{flag} {given!r} is none of {', '.join(kind)}")
    return None if given is None else kind(given)


def _profile(file: str | None) -> tuple[DeviceProfile, str]:
    """The figures to plan with, and where they are from."""
    from kvferry.kernels.jit import process_loader
    from kvferry.transfer import BUILT_IN, find_profile

    if file is not None:
        return _saved_profile(Path(file)), file
    try:
        driver = process_loader().driver
        if driver.num_devices < 1:
            return BUILT_IN, "there is no GPU here"
        found = find_profile(driver.context(0))
    except (MissingDependencyError, DriverError):  # `kvferry doctor` tells which
        return BUILT_IN, "no GPU can be used here"
    if found.path is not None:
        return found.profile, f"GPU 0, {found.path}"
    return found.profile, found.reason or "nobody calibrated GPU 0; run kvferry calibrate"


def _saved_profile(path: Path) -> DeviceProfile:
    """What a file of the cache folder, or the output of ``kvferry calibrate --json``, tells."""
    from kvferry.transfer import DeviceProfile

    try:
        told = json.loads(path.read_bytes())
    except OSError as bad:
        raise ConfigError(
            f"--profile {path} cannot be read ({bad.strerror or bad}); name a file that kvferry "
            f"calibrate kept or printed with --json, or leave it out"
        ) from bad
    except (ValueError, RecursionError) as bad:  # also text that is not UTF-8
        raise ConfigError(f"--profile {path}: it is not JSON ({bad})") from bad
    try:
        return DeviceProfile.from_dict(
            told.get("profile", told) if isinstance(told, dict) else told
        )
    except ConfigError as bad:
        raise ConfigError(f"--profile {path}: {bad}") from bad


def _described(
    asked: _Asked, staging_bytes: int, previews: Sequence[RoutePreview]
) -> dict[str, Any]:
    return {
        "geometry": {**asked.geometry.to_dict(), "fingerprint": asked.geometry.fingerprint},
        "tokens": asked.tokens,
        "page_size": asked.geometry.page_size,
        "device_run": asked.device_run,
        "host_layout": asked.layout.value,
        "staging_bytes": staging_bytes,
        "profile": {"from": asked.profile_from, **asked.profile.to_dict()},
        "routes": [preview.to_dict() for preview in previews],
    }


def _told(asked: _Asked, previews: Sequence[RoutePreview]) -> Iterator[str]:
    yield from _wrapped("profile", f"{asked.profile.source} ({asked.profile_from})")
    for preview in previews:
        yield ""
        yield from _told_of(asked, preview)


def _told_of(asked: _Asked, preview: RoutePreview) -> Iterator[str]:
    route = preview.route
    yield from _wrapped(
        preview.direction.value,
        f"{_many(asked.tokens, 'token')} in {_many(preview.num_pages, 'page')} of "
        f"{asked.geometry.page_size:,}, {_size(preview.num_bytes)}; the host pool is "
        f"{asked.layout.value}, and the pages lie there in "
        f"{_many(preview.num_runs, 'run')} of neighbours",
    )
    mover = route.mover.value
    yield from _wrapped("mover", f"{mover}, {route.reason.removeprefix(f'{mover} ')}")
    widest = max(len(way) for way in preview.seconds)
    for number, (way, seconds) in enumerate(preview.seconds.items()):
        rate = preview.num_bytes / seconds / 1e9
        head = "" if number else "estimated"
        yield f"{head:<{_HEAD}}{way:<{widest}}  {seconds * 1e3:9,.3f} ms  {rate:5.1f} GB/s"
    yield from _wrapped("steps", _steps(route.sizes))
    if (preview.num_pages, preview.num_runs) != (preview.planned_pages, preview.planned_runs):
        yield from _wrapped(
            "",
            f"as planned for {_many(preview.planned_pages, 'page')} in "
            f"{_many(preview.planned_runs, 'run')}: counts are rounded down to powers of two, so "
            f"that there are few routes",
        )
    if route.mover is Mover.STAGED:
        widths = [tuple(band.width for band in group.bands) for group in route.groups]
        yield from _wrapped("copies", f"of each page: {_widths(widths)}")
        yield from _wrapped("", _calls(preview))
    for one in preview.kernels:
        reason = one.reason.removeprefix(f"{one.kernel}: ")
        layers = _many(len(one.layers), "layer")
        yield from _wrapped("kernel", f"{one.kernel} for {one.plane}, {layers}: {reason}")


def _steps(sizes: Sequence[int]) -> str:
    """How many layers go in each step."""
    if len(sizes) == 1:
        return f"1, of {_many(sizes[0], 'layer')}"
    each: list[str] = []
    for size, count in _equal(sizes):
        each += [f"{size:,}"] * count if count < 3 else [f"{size:,} ({count} times)"]
    return f"{len(sizes):,}, of {', '.join(each[:-1])}{' and ' * (len(each) > 1)}{each[-1]} layers"


def _widths(steps: Sequence[tuple[int, ...]]) -> str:
    """The bytes of a page that are copied in each step, band by band; equal steps together."""
    told: list[str] = []
    step = 1
    for widths, count in _equal(steps):
        bands = " + ".join(
            f"{width:,}" if many == 1 else f"{many} x {width:,}" for width, many in _equal(widths)
        )
        last = step + count - 1
        where = {1: f"step {step}", 2: f"steps {step} and {last}"}.get(
            count, f"steps {step} to {last}"
        )
        told.append(f"{bands}{'' if told else ' bytes'} in {where}")
        step += count
    return ", ".join(told)


def _calls(preview: RoutePreview) -> str:
    batches = preview.num_batches
    strided = preview.num_copy_calls - batches
    kinds = [f"{strided:,} strided"] * (strided > 0) + [f"{batches:,} of many pages each"] * (
        batches > 0
    )
    return (
        f"in {_many(preview.num_copy_calls, 'call')} for "
        f"{_many(preview.num_pieces, 'piece')} of staging: {', '.join(kinds)}"
    )


def _equal(values: Iterable[_T]) -> Iterator[tuple[_T, int]]:
    """Each value once for all its equal neighbours, with how many they are."""
    for value, same in itertools.groupby(values):
        yield value, len(list(same))


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _size(num_bytes: int) -> str:
    for power, unit in ((9, "GB"), (6, "MB"), (3, "KB")):
        if num_bytes >= 10**power:
            return f"{num_bytes / 10**power:,.1f} {unit}"
    return _many(num_bytes, "byte")


def _wrapped(head: str, text: str) -> Iterator[str]:
    for number, line in enumerate(textwrap.wrap(text, _WIDTH - _HEAD)):
        yield f"{'' if number else head:<{_HEAD}}{line}"

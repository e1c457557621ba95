"""A real model reads a text; its cache is carried away and brought back, exactly.

    python examples/demo.py                     SmolLM2-135M, about a minute on two cores
    python examples/demo.py --random-weights    a tiny random model, nothing to download, seconds

Exits with 1 if a byte of the cache, a logit or a token differs from what a prefix prefilled fresh
to the same page boundary gives.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Bars of ours only, and nothing is looked up elsewhere: all files are here.
os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1")

try:
    import rich  # noqa: F401
    import torch
    import transformers
except ImportError as absent:
    sys.exit(f"the demo needs one package more ({absent}): pip install 'kvferry[demo]'")

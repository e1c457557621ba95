"""`PrefixCache` on the GPU: all cases of `tests/adapters`, which run on the CPU elsewhere.

They put their models on a GPU where there is one. Here they are under the mark `gpu`, so that a run
in which torch sees none has tested nothing, and says so.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from tests.adapters import test_prefix_cache, test_prefix_cache_batches
from tests.adapters.tiny_models import DEVICE, model_of

pytestmark = pytest.mark.gpu

for _module in (test_prefix_cache, test_prefix_cache_batches):
    globals().update(
        {name: case for name, case in vars(_module).items() if name.startswith("test_")}
    )


def test_the_models_are_on_the_gpu() -> None:
    """Else all cases here would show what they show on the CPU."""
    assert torch.device(DEVICE).type == "cuda"
    assert {weight.device.type for weight in model_of("gqa").parameters()} == {"cuda"}

"""The engine without what it imports and its host pools do not need."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.adapters.sglang.fake_world import World


class _Anything(type):
    """A class all of whose attributes are there."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Stub(types.ModuleType):
    """A module all of whose names are classes that do nothing."""

    __path__ = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


# The engine's configs import torchvision, which is large and tied to one build of torch.
if importlib.util.find_spec("sglang") and not importlib.util.find_spec("torchvision"):
    # It looks for torchvision once, and must not find what stands for it.
    importlib.import_module("transformers").AutoProcessor  # noqa: B018
    for _name in ("", ".transforms", ".transforms.functional", ".transforms.v2", ".io"):
        _stub = _Stub(f"torchvision{_name}")
        _stub.__spec__ = importlib.machinery.ModuleSpec(_stub.__name__, None)
        sys.modules[_stub.__name__] = _stub


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A GPU that the adapter finds, and that nobody has used wrongly in the end."""
    # Only the tests that want one need torch.
    from tests.adapters.sglang.fake_world import a_world

    yield from a_world(monkeypatch)

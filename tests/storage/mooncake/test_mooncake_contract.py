"""The backend does what any must, through its own buffer and in memory that it was given."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.storage.mooncake.pool_rig import Master, opened

from kvferry.storage import Buffers, ItemResult
from kvferry.storage.mooncake import MooncakeBackend
from kvferry.testing import STORAGE_CHECKS, BackendFactory

_NUMBERS = itertools.count()


class _InPlace(MooncakeBackend):
    """Registers the memory of each call for its length."""

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        with self._known(buffers):
            return super().read_into(keys, buffers)

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        with self._known(buffers):
            return super().write_from(keys, buffers)

    @contextlib.contextmanager
    def _known(self, buffers: Sequence[Buffers]) -> Iterator[None]:
        parts = [part for parts in buffers for part in parts if part[1]]
        known = [address for address, length in parts if self.register_memory(address, length)]
        assert len(known) == len(parts) or self.stats().errors["closed"]
        try:
            yield
        finally:
            for address in known:
                self.unregister_memory(address)


@pytest.fixture(params=["staged", "in place"])
def make(request: pytest.FixtureRequest, master: Master) -> BackendFactory:
    """Backends with a prefix of their own each, and so empty."""

    def staged(capacity: int | None) -> MooncakeBackend:
        return opened(master, key_prefix=f"{os.getpid()}/{next(_NUMBERS)}/")

    def in_place(capacity: int | None) -> MooncakeBackend:
        return _InPlace(
            master.address, buffer_bytes=1 << 20, key_prefix=f"{os.getpid()}/{next(_NUMBERS)}/"
        )

    return in_place if request.param == "in place" else staged


@pytest.mark.parametrize("check", STORAGE_CHECKS, ids=lambda check: check.__name__.strip("_"))
def test_the_contract(make: BackendFactory, check: Callable[[BackendFactory], None]) -> None:
    """Each check passes."""
    check(make)

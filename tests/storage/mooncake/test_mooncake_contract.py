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
from kvferry.testing import STORAGE_CHECKS, BackendFactory, check_storage_at

_NUMBERS = itertools.count()
_MOVING = ("every_size", "scattered", "mixed_batch", "exact_length", "many_threads")


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


def _prefix() -> str:
    return f"{os.getpid()}/{next(_NUMBERS)}/"


@pytest.mark.parametrize("check", STORAGE_CHECKS, ids=lambda check: check.__name__.strip("_"))
def test_through_the_buffer(master: Master, check: Callable[[BackendFactory], None]) -> None:
    """Each check passes on backends with a prefix of their own, and so empty."""
    check(lambda _: opened(master, key_prefix=_prefix()))


@pytest.mark.parametrize(
    "check",
    [check for check in STORAGE_CHECKS if check.__name__.strip("_") in _MOVING],
    ids=lambda check: check.__name__.strip("_"),
)
def test_in_place(master: Master, check: Callable[[BackendFactory], None]) -> None:
    """So do those that move bytes, where the library has all memory."""
    check(lambda _: _InPlace(master.address, key_prefix=_prefix()))


def test_the_checks_that_move_bytes_are_there() -> None:
    """A check that was renamed is not left out unseen."""
    assert set(_MOVING) <= {check.__name__.strip("_") for check in STORAGE_CHECKS}


def test_by_a_url(master: Master) -> None:
    """So do those that a URL names."""
    url = f"mooncake://{master.address}?buffer_bytes=4MiB&deadline_secs=20&key_prefix=mine/"
    told = list(check_storage_at(url))
    assert [one for one in told if one.complaint] == []
    assert len(told) == 1 + len(STORAGE_CHECKS)

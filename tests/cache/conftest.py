"""The GPU of the tests of transfers, for caches over it."""

from tests.transfer.conftest import gpu

__all__ = ["gpu"]

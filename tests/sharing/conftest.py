"""The GPU of the tests of transfers, for ranks over it."""

from tests.transfer.conftest import gpu

__all__ = ["gpu"]

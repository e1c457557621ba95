"""The GPU of the tests of transfers."""

from tests.transfer.conftest import gpu

__all__ = ["gpu"]

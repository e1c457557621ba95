"""The ``kvferry`` command."""

from kvferry.cli.main import main

__all__ = ["main"]

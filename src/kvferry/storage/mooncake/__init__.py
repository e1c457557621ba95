"""Objects in a Mooncake Store: a pool of memory that many machines share."""

from __future__ import annotations

from kvferry.storage.mooncake.backend import MooncakeBackend

__all__ = ["MooncakeBackend"]

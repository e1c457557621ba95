"""`KVFerry`, the tiered cache: everything below put together, as an engine uses it."""

from __future__ import annotations

from kvferry.cache.ferry import KVFerry
from kvferry.cache.reports import CloseReport, Explanation, FlushReport

__all__ = ["CloseReport", "Explanation", "FlushReport", "KVFerry"]

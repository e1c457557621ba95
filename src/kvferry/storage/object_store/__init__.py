"""Objects in an object store: S3, Google Cloud Storage, Azure, and what speaks like them."""

from __future__ import annotations

from kvferry.storage.object_store.backend import ObjectStoreBackend

__all__ = ["ObjectStoreBackend"]

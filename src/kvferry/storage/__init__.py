"""Storage below host memory: objects under keys, kept by backends, and pages made of them."""

from __future__ import annotations

from kvferry.storage.base import (
    INTERFACE_VERSION,
    MAX_KEY_BYTES,
    Buffers,
    ItemResult,
    ItemStatus,
    StorageBackend,
    StorageStats,
    check_batch,
    key_complaint,
    total_bytes,
)
from kvferry.storage.checked_objects import CheckedObjects, PageStoreCounts
from kvferry.storage.file import FileBackend
from kvferry.storage.file_folder import FsyncPolicy
from kvferry.storage.file_index import KnownFile
from kvferry.storage.file_inventory import (
    FolderContents,
    Inspected,
    Pruned,
    StorageInspector,
)
from kvferry.storage.format import (
    FORMAT_VERSION,
    HeaderFault,
    HeaderProblem,
    ObjectHeader,
    checksum,
    header_bytes,
    parse_header,
)
from kvferry.storage.memory import MemoryBackend
from kvferry.storage.objects import PageStore
from kvferry.storage.registry import BACKENDS, check_backend, open_backend, try_backend

__all__ = [
    "BACKENDS",
    "FORMAT_VERSION",
    "INTERFACE_VERSION",
    "MAX_KEY_BYTES",
    "Buffers",
    "CheckedObjects",
    "FileBackend",
    "FolderContents",
    "FsyncPolicy",
    "HeaderFault",
    "HeaderProblem",
    "Inspected",
    "ItemResult",
    "ItemStatus",
    "KnownFile",
    "MemoryBackend",
    "ObjectHeader",
    "PageStore",
    "PageStoreCounts",
    "Pruned",
    "StorageBackend",
    "StorageInspector",
    "StorageStats",
    "check_backend",
    "check_batch",
    "checksum",
    "header_bytes",
    "key_complaint",
    "open_backend",
    "parse_header",
    "total_bytes",
    "try_backend",
]

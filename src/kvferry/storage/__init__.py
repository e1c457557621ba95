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
from kvferry.storage.registry import (
    BACKENDS,
    backend_class,
    check_backend,
    open_backend,
    try_backend,
)
from kvferry.storage.url import StorageUrl, is_storage_url, parse_storage_url

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
    "StorageUrl",
    "backend_class",
    "check_backend",
    "check_batch",
    "checksum",
    "header_bytes",
    "is_storage_url",
    "key_complaint",
    "open_backend",
    "parse_header",
    "parse_storage_url",
    "total_bytes",
    "try_backend",
]

"""How objects are called in a storage folder, and which names are whose."""

from __future__ import annotations

import hashlib
import re

from kvferry.storage.base import MAX_KEY_BYTES

__all__ = [
    "LAYOUT_TEXT",
    "MARKER",
    "QUARANTINE",
    "key_of",
    "object_name",
    "shard_of",
    "shards",
    "temporary_name",
    "temporary_pattern",
]

MARKER = "KVFERRY"
"""The file that says that a folder is kvferry's, and how it is laid out."""

LAYOUT_TEXT = b"kvferry storage folder, layout 1\n"

QUARANTINE = "quarantine"
"""The folder for damaged objects."""

_OBJECT = re.compile(rf"(?P<key>(?:[0-9a-f]{{2}}){{1,{MAX_KEY_BYTES}}})\.kvo")

temporary_pattern = re.compile(r"\.[0-9a-f]+-[0-9]+\.tmp")
"""What a file is called while it is written."""


def shard_of(key: bytes) -> str:
    """The folder of `key`: 256 of them, filled evenly whatever keys look like."""
    return hashlib.blake2b(key, digest_size=1).hexdigest()


def shards() -> list[str]:
    """Every folder that `shard_of` names."""
    return [f"{number:02x}" for number in range(256)]


def object_name(key: bytes) -> str:
    """The file name of `key`."""
    return f"{key.hex()}.kvo"


def key_of(name: str) -> bytes | None:
    """The key whose `object_name` is `name`; None if it is no object's."""
    found = _OBJECT.fullmatch(name)
    return bytes.fromhex(found["key"]) if found else None


def temporary_name(token: str, number: int) -> str:
    """A name that no object has; `token` is the writer's own."""
    return f".{token}-{number}.tmp"

"""The store's own client: loaded, set up and ended."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
from typing import Any, Protocol

from kvferry.errors import ConfigError, MissingDependencyError, StorageError

__all__ = ["Client", "connect", "split_address"]

_P2P = "P2PHANDSHAKE"
# Ends without ending the library, which takes a second and has nothing to give back here.
_TRY = """
import os, sys
from mooncake.store import MooncakeDistributedStore
host, metadata, protocol, devices, master = sys.argv[1:]
code = MooncakeDistributedStore().setup(host, metadata, 0, 0, protocol, devices, master)
os._exit(1 if code else 0)
"""


class Client(Protocol):
    """What is used of `MooncakeDistributedStore`: a code or a length a key, nothing raised."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int: ...
    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...
    def unregister_buffer(self, buffer_ptr: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def get_size(self, key: str) -> int: ...
    def batch_remove(self, keys: list[str]) -> list[int]: ...
    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]: ...
    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        config: Any,
    ) -> list[int]: ...
    def batch_upsert_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: Any
    ) -> list[int]: ...
    def close(self) -> int: ...


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``, or raise ConfigError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"address={address!r} is no master: give it as host:port")
    return host.strip("[]"), int(port)


def connect(
    address: str,
    *,
    local_hostname: str,
    segment_bytes: int,
    protocol: str,
    devices: str,
    replicas: int,
    timeout: float,
) -> tuple[Client, Any]:
    """A client of the master at `address`, and the config for its puts.

    Raises:
        MissingDependencyError: The wheel is not installed, or a library that it needs.
        StorageError: The master cannot be reached within `timeout` seconds, or the set-up failed.
    """
    store = _load()
    host, port = split_address(address)
    try:
        # The library tries for a minute and a half; this finds out in a moment.
        socket.create_connection((host, port), timeout).close()
    except OSError as bad:
        raise StorageError(
            f"the Mooncake master at {address} cannot be reached: {bad}; start it, or correct the "
            f"address"
        ) from bad
    _try_master(address, local_hostname, protocol, devices, timeout)
    client: Client = store.MooncakeDistributedStore()
    code = client.setup(local_hostname, _P2P, segment_bytes, 0, protocol, devices, address)
    if code:
        raise StorageError(
            f"the Mooncake client could not be set up (code {code}) with the master {address} as "
            f"{local_hostname} over {protocol}, with {segment_bytes} bytes for the pool: what it "
            f"wrote to stderr says more"
        )
    config = store.ReplicateConfig()
    config.replica_num = replicas
    return client, config


def _try_master(
    address: str, local_hostname: str, protocol: str, devices: str, timeout: float
) -> None:
    """Raise StorageError unless a set-up goes well in another process, within `timeout` seconds.

    The library holds the interpreter lock while it is set up. With a master that accepts and says
    nothing that lasts for minutes, in which no thread of this process would run.
    """
    try:
        tried = subprocess.run(  # noqa: S603  this interpreter, with arguments of ours
            [sys.executable, "-c", _TRY, local_hostname, _P2P, protocol, devices, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise StorageError(
            f"the Mooncake master at {address} did not answer within {timeout} s; see to it, or "
            f"give a longer setup_secs"
        ) from late
    if tried.returncode:
        said = tried.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise StorageError(
            f"a set-up with the Mooncake master at {address} failed, as {local_hostname} over "
            f"{protocol}: {' | '.join(said) or tried.returncode}"
        )


def _load() -> Any:
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as absent:
        raise MissingDependencyError(
            "the Mooncake backend needs Mooncake's Python package: pip install 'kvferry[mooncake]'"
        ) from absent
    except ImportError as broken:
        raise MissingDependencyError(
            f"Mooncake's library does not load ({broken}): it needs libibverbs also without RDMA; "
            f"apt-get install libibverbs1"
        ) from broken

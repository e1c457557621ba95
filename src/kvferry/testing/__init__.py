"""What kvferry's own tests are made of, for the tests of others, and the self-test."""

from kvferry.testing.device_memory import GuardedDeviceBuffer
from kvferry.testing.faulty_backend import Fault, FaultKind, FaultyBackend
from kvferry.testing.host_damage import flip_host_bit
from kvferry.testing.layouts import (
    DeviceLayout,
    num_pool_bytes,
    place_device_layers,
    place_host_layers,
)
from kvferry.testing.numeric import assert_bytes_equal, first_difference
from kvferry.testing.patterns import (
    GUARD_BYTES,
    POISON,
    GuardedBuffer,
    memory_at,
    mix64,
    moved_view,
    pattern_rows,
    read_rows,
    write_rows,
)
from kvferry.testing.reference import reference_digest, reference_row, reference_transfer
from kvferry.testing.reserved import ReservedSpace
from kvferry.testing.round_trip import DeviceMemory, RoundTrip
from kvferry.testing.selftest import (
    PathCounts,
    SelfTestCase,
    SelfTestFailure,
    SelfTestReport,
    run_selftest,
    selftest_cases,
)
from kvferry.testing.storage_check import StorageChecked, check_storage_at
from kvferry.testing.storage_contract import (
    STORAGE_CHECKS,
    BackendFactory,
    check_storage_backend,
)

__all__ = [
    "GUARD_BYTES",
    "POISON",
    "STORAGE_CHECKS",
    "BackendFactory",
    "DeviceLayout",
    "DeviceMemory",
    "Fault",
    "FaultKind",
    "FaultyBackend",
    "GuardedBuffer",
    "GuardedDeviceBuffer",
    "PathCounts",
    "ReservedSpace",
    "RoundTrip",
    "SelfTestCase",
    "SelfTestFailure",
    "SelfTestReport",
    "StorageChecked",
    "assert_bytes_equal",
    "check_storage_at",
    "check_storage_backend",
    "first_difference",
    "flip_host_bit",
    "memory_at",
    "mix64",
    "moved_view",
    "num_pool_bytes",
    "pattern_rows",
    "place_device_layers",
    "place_host_layers",
    "read_rows",
    "reference_digest",
    "reference_row",
    "reference_transfer",
    "run_selftest",
    "selftest_cases",
    "write_rows",
]

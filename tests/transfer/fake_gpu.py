"""A GPU made of host memory: the driver's functions, streams that a test holds back, real kernels.

What is enqueued in a stream waits there while the stream is held, and is carried out at once where
it is not. Kernels are the device headers' own functions, compiled for this machine. Work that uses
memory after it was freed or unregistered is left out and noted in `FakeGpu.faults`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import enum
import functools
import itertools
import random
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from tests.kernels.emulator import kernel_emulator
from tests.transfer.fake_time import FakeTime, Work

from kvferry.kernels.transfer_args import SpanArgs, TransferArgs
from kvferry.types import Direction

CALLER = 0
"""The caller's stream: the legacy default one."""

_ALIGNMENT = 256
_FRESH = 0xA5
_NUM_WORDS = {"flat": 0, "realign": 1, "grouped": 3, "finish": 0}
"""How many words a kernel takes behind the transfer."""
_FIRST_KERNEL = 0x2000


def kernel_handle(name: str) -> int:
    """What the driver calls the kernel `name`."""
    return _FIRST_KERNEL + list(_NUM_WORDS).index(name)


FINISH = kernel_handle("finish")


class Status(enum.IntEnum):
    """The driver's codes that are used here."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_REGISTERED = 713
    CUDA_ERROR_LAUNCH_FAILED = 719


class _Attribute(enum.Enum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 9
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 0
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 132


Hook = Callable[..., Status | None]
"""Called with a function's arguments before it: what it fails with, or None to let it go on."""

_BatchCall = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    ctypes.c_void_p,
)

_RowsCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_EventCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_WaitCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
_LaunchCall = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    *[ctypes.c_void_p] * 3,
)

# One entry of a stream: whether it is over. One that is not is tried again later.
_Entry = Callable[[], bool]


def _fields_of_side(side: str) -> tuple[tuple[str, Any], ...]:
    return (
        (f"{side}XInBytes", ctypes.c_size_t),
        (f"{side}Y", ctypes.c_size_t),
        (f"{side}MemoryType", ctypes.c_int),
        (f"{side}Host", ctypes.c_void_p),
        (f"{side}Device", ctypes.c_uint64),
        (f"{side}Array", ctypes.c_void_p),
        (f"{side}Pitch", ctypes.c_size_t),
    )


class _RowCopy(ctypes.Structure):
    """`CUDA_MEMCPY2D`."""

    _fields_ = (
        *_fields_of_side("src"),
        *_fields_of_side("dst"),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


class FakeGpu:
    """What stands for `cuda.bindings.driver`: `cuMemAlloc` is `_cu_mem_alloc` here."""

    CUresult = Status
    CUdevice_attribute = _Attribute
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DEFAULT=0, CU_EVENT_DISABLE_TIMING=2)
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_HOST=1, CU_MEMORYTYPE_DEVICE=2)
    CUDA_MEMCPY2D = SimpleNamespace
    CUpointer_attribute = SimpleNamespace(
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER="address", CU_POINTER_ATTRIBUTE_MEMORY_TYPE="type"
    )
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2

    def __init__(self) -> None:
        self.mover: str | None = None
        """What engines over it are asked for, unless a test says so."""
        self.batches = True
        """Whether the driver knows copies of many pieces."""
        self._entries: dict[tuple[bytes, int], Any] = {
            (b"cuMemcpyBatchAsync", 13000): _BatchCall(self._batch),
            (b"cuMemcpy2DAsync", 3020): _RowsCall(self._rows),
            (b"cuEventRecord", 2000): _EventCall(functools.partial(self._entry, "cuEventRecord")),
            (b"cuStreamWaitEvent", 3020): _WaitCall(
                functools.partial(self._entry, "cuStreamWaitEvent")
            ),
            (b"cuLaunchKernel", 4000): _LaunchCall(
                functools.partial(self._entry, "cuLaunchKernel")
            ),
        }
        self.hooks: dict[str, Hook] = {}
        """By name of the driver's function."""
        self.calls: list[str] = []
        """The functions that were called, and ``kernel flat`` for a launch."""
        self.faults: list[str] = []
        """What was done with memory that is not there any more."""
        self.device_memory: dict[int, int] = {}
        """What is allocated: address and size."""
        self.pinned_memory: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.events: set[int] = set()
        self.stream_of: dict[Direction, int] = {}
        """In which stream bytes of loads and of stores were moved last."""
        self.report_stream_of: dict[Direction, int] = {}
        """In which stream digests of loads and of stores were finished last."""
        self.time = FakeTime()
        self._emulator = kernel_emulator()
        self._handles = itertools.count(1)
        self._streams: dict[int, collections.deque[_Entry]] = {CALLER: collections.deque()}
        self._held: set[int] = set()
        self._recorded: collections.Counter[int] = collections.Counter()
        # By event and number: one that is recorded anew, in another stream, says nothing of the
        # record before it, which others may wait for.
        self._reached: set[tuple[int, int]] = set()
        self._destroyed: set[int] = set()
        self._buffers: list[Any] = []  # freed ones too: nothing else may come to lie there
        self._freed: dict[int, int] = {}
        self._contexts = threading.local()
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------------ for tests

    def hold(self, *streams: int) -> None:
        """Carry out nothing more of `streams`; of those that moved something if none is named."""
        self._held |= set(streams or self.stream_of.values())

    def release(self, *streams: int) -> None:
        """Go on with `streams`, or with all."""
        self._held -= set(streams or self._held)
        self._run()

    @contextlib.contextmanager
    def held(self, *streams: int) -> Iterator[None]:
        """`hold` them for the block."""
        self.hold(*streams)
        try:
            yield
        finally:
            self.release(*streams)

    def hold_all(self) -> None:
        """Carry out nothing more of any stream that there is."""
        self._held |= set(self._streams)

    def interleave(self, seed: int, look: Callable[[], object] = lambda: None) -> None:
        """Carry out all that is pending, one entry at a time from any stream that can go on.

        After each, `look`.
        """
        rng = random.Random(seed)
        with self._lock:
            while True:
                pending = [entries for entries in self._streams.values() if entries]
                rng.shuffle(pending)
                found = next((entries for entries in pending if entries[0]()), None)
                if found is None:
                    break
                found.popleft()
                look()
        assert self.num_pending() == 0, "a stream waits for something that never comes"

    def num_pending(self, stream: int | None = None) -> int:
        """How many entries wait in a stream, or in all."""
        chosen = self._streams.values() if stream is None else [self._streams[stream]]
        return sum(map(len, chosen))

    def new_stream(self) -> int:
        """Another stream of the caller's own."""
        return self._cu_stream_create_with_priority(0, 0)

    def enqueue(self, stream: int, work: Callable[[], object]) -> None:
        """Work of the caller's own, in order with what is in `stream`."""
        self._put(stream, lambda: (work(), True)[1])

    @contextlib.contextmanager
    def failing(
        self,
        function: str,
        status: Status = Status.CUDA_ERROR_OUT_OF_MEMORY,
        *,
        when: Callable[..., bool] = lambda *_: True,
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Let `function` fail where `when` says so of its arguments; gives those that did."""
        refused: list[tuple[Any, ...]] = []

        def hook(*arguments: Any) -> Status | None:
            if not when(*arguments):
                return None
            refused.append(arguments)
            return status

        self.hooks[function] = hook
        try:
            yield refused
        finally:
            del self.hooks[function]

    @property
    def holdings(self) -> dict[str, int]:
        """How much the process holds of the GPU: what must not grow."""
        return {
            "device bytes": sum(self.device_memory.values()),
            "pinned bytes": sum(self.pinned_memory.values()),
            "events": len(self.events),
        }

    @property
    def kernels(self) -> list[str]:
        """The kernels that were launched, in order."""
        return [name.removeprefix("kernel ") for name in self.calls if name.startswith("kernel ")]

    # ---------------------------------------------------------------------------- the machinery

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        own = "_" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
        return functools.partial(self._call, name, object.__getattribute__(self, own))

    def _call(self, name: str, method: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
        self.calls.append(name)
        needs_none = ("cuInit", "cuDriver", "cuGetError", "cuDevice", "cuCtxPush")
        if not name.startswith(needs_none) and not self._depth:
            return (Status.CUDA_ERROR_INVALID_CONTEXT,)
        hook = self.hooks.get(name)
        failed = None if hook is None else hook(*arguments)
        if failed is not None:
            return (failed,)
        with self._lock:
            result = method(*arguments)
        if isinstance(result, Status):
            return (result,)
        values = result if isinstance(result, tuple) else () if result is None else (result,)
        return (Status.CUDA_SUCCESS, *values)

    @property
    def _depth(self) -> int:
        return int(getattr(self._contexts, "depth", 0))

    def _put(self, stream: int, entry: _Entry) -> Status | None:
        if stream not in self._streams or stream in self._destroyed:
            return Status.CUDA_ERROR_INVALID_HANDLE
        self._streams[stream].append(entry)
        self._run()
        return None

    def _run(self) -> None:
        with self._lock:
            moved = True
            while moved:
                moved = False
                for stream, entries in self._streams.items():
                    while entries and stream not in self._held and entries[0]():
                        entries.popleft()
                        moved = True

    def _allocate(self, kind: dict[int, int], num_bytes: int) -> int:
        buffer = ctypes.create_string_buffer(num_bytes + _ALIGNMENT)
        ctypes.memset(buffer, _FRESH, len(buffer))
        self._buffers.append(buffer)
        address = -(-ctypes.addressof(buffer) // _ALIGNMENT) * _ALIGNMENT
        kind[address] = num_bytes
        return address

    def _free(self, kind: dict[int, int], address: int) -> Status | None:
        if address not in kind:
            return Status.CUDA_ERROR_INVALID_VALUE
        self._freed[address] = kind.pop(address)
        return None

    def _good(self, what: str, *addresses: int) -> bool:
        gone = [at for at in addresses if at < _ALIGNMENT or _lies_in(self._freed, at)]
        self.faults += [f"{what} uses {at:#x}, which is not there" for at in gone]
        return not gone

    def _in_one(self, what: str, *ranges: tuple[int, int]) -> bool:
        """Whether each range, an address and a size, is in one allocation or registration."""
        there = (self.device_memory | self.registered | self.pinned_memory).items()
        for address, size in ranges:
            if not any(at <= address and address + size <= at + room for at, room in there):
                self.faults.append(f"{what} of {size} bytes at {address:#x} is not in one piece")
                return False
        return True

    def _carry_out(
        self, kernel: str, transfer: TransferArgs, words: list[int], blocks: int
    ) -> bool:
        named = ("spans", "page_seeds", "sums", "bad_pages", "fault")
        tables = [at for at in (*transfer.rows, transfer.host_slots) if at]
        if self._good(kernel, *tables, *(getattr(transfer, name) for name in named)):
            first = transfer.spans + transfer.first_span * ctypes.sizeof(SpanArgs)
            spans = (SpanArgs * transfer.num_spans).from_address(first)
            pinned = self.registered | self.pinned_memory
            staging = transfer.host_base
            if all(_lies_in(pinned, one.digests) for one in spans) and (
                _lies_in(self.device_memory, staging)
                if staging
                else kernel == "finish" or all(_lies_in(pinned, one.host.base) for one in spans)
            ):
                getattr(self._emulator, f"emulate_{kernel}")(ctypes.byref(transfer), *words)
                size = sum(one.num_bytes for one in spans) * transfer.num_pages
                self.time.spend(Work(kernel, bool(transfer.is_load), size, blocks=blocks))
            else:
                self.faults.append(f"{kernel} uses a host pool that is not pinned")
        return True

    def _copy(
        self, target: int, source: int, num_bytes: int, stream: int, *, to_device: bool = True
    ) -> Status | None:
        def work() -> bool:
            if self._good("a copy", target, source):
                ctypes.memmove(target, source, num_bytes)
                self.time.spend(Work("copy", to_device, num_bytes))
            return True

        return self._put(stream, work)

    def _copy_rows(self, told: SimpleNamespace, stream: int) -> Status | None:
        # Read now: the caller fills the same structure for its next copy.
        (target, far), (source, near) = (_side(told, which) for which in ("dst", "src"))
        width, rows = told.WidthInBytes, told.Height
        to_device = told.dstMemoryType == self.CUmemorytype.CU_MEMORYTYPE_DEVICE
        if rows > 1 and min(far, near) < width:
            return Status.CUDA_ERROR_INVALID_VALUE

        def work() -> bool:
            moved = [
                (to, at)
                for to, at in ((target + row * far, source + row * near) for row in range(rows))
                if width and self._good("a copy of rows", to, at)
            ]
            sizes = ((rows - 1) * pitch + width for pitch in (far, near))
            if moved and self._in_one("a copy of rows", *zip((target, source), sizes, strict=True)):
                for to, at in moved:
                    ctypes.memmove(to, at, width)
            self.time.spend(Work("rows", to_device, width * rows, width))
            return True

        return self._put(stream, work)

    # -------------------------------------------------------------------- the driver's functions

    def _cu_init(self, _: int) -> None:
        pass

    def _cu_driver_get_version(self) -> int:
        return 13000

    def _cu_get_error_name(self, status: Status) -> bytes:
        return status.name.encode()

    def _cu_get_error_string(self, _: Status) -> bytes:
        return b"as the test wanted it"

    def _cu_device_get_count(self) -> int:
        return 1

    def _cu_device_get(self, index: int) -> int:
        return index

    def _cu_device_get_attribute(self, attribute: _Attribute, _: int) -> int:
        return attribute.value

    def _cu_device_get_name(self, _: int, __: int) -> bytes:
        return b"Fake GPU\0\0"

    def _cu_device_get_pcibus_id(self, _: int, __: int) -> bytes:
        return b"0000:AB:00.0\0"

    def _cu_device_primary_ctx_retain(self, _: int) -> int:
        return 0x1000

    def _cu_ctx_push_current(self, _: int) -> None:
        self._contexts.depth = self._depth + 1

    def _cu_ctx_pop_current(self) -> int:
        self._contexts.depth = self._depth - 1
        return 0x1000

    def _cu_ctx_get_stream_priority_range(self) -> tuple[int, int]:
        return 0, -1

    def _cu_thread_exchange_stream_capture_mode(self, mode: int) -> int:
        return mode

    def _cu_stream_is_capturing(self, _: int) -> int:
        return 0

    def _cu_stream_create_with_priority(self, _: int, __: int) -> int:
        handle = next(self._handles)
        self._streams[handle] = collections.deque()
        return handle

    def _cu_stream_destroy(self, handle: int) -> None:
        self._destroyed.add(handle)  # what is in it is carried out all the same

    def _cu_stream_synchronize(self, handle: int) -> None:
        self.release(handle)
        if self._streams[handle]:
            self.release()  # it waits however long that takes
        assert not self._streams[handle], "the stream waits for something that never comes"

    def _cu_stream_wait_event(self, stream: int, event: int, _: int) -> Status | None:
        awaited = self._recorded[event]
        return self._put(stream, lambda: self._is_reached(event, awaited))

    def _cu_event_create(self, flags: int) -> int:
        self.events.add(handle := next(self._handles))
        if flags == self.CUevent_flags.CU_EVENT_DEFAULT:
            self.time.watch(handle)
        return handle

    def _cu_event_destroy(self, event: int) -> None:
        self.events.remove(event)

    def _is_reached(self, event: int, number: int) -> bool:
        return number == 0 or (event, number) in self._reached

    def _cu_event_record(self, event: int, stream: int) -> Status | None:
        self._recorded[event] += 1
        number = self._recorded[event]

        def reach() -> bool:
            self._reached.add((event, number))
            self.time.reach(event)
            return True

        return self._put(stream, reach)

    def _cu_event_query(self, event: int) -> Status | None:
        over = self._is_reached(event, self._recorded[event])
        return None if over else Status.CUDA_ERROR_NOT_READY

    def _cu_event_elapsed_time(self, earlier: int, later: int) -> float | Status:
        found = self.time.between(earlier, later)
        return Status.CUDA_ERROR_INVALID_HANDLE if found is None else found

    def _cu_mem_alloc(self, num_bytes: int) -> int:
        return self._allocate(self.device_memory, num_bytes)

    def _cu_mem_free(self, address: int) -> Status | None:
        return self._free(self.device_memory, address)

    def _cu_mem_host_alloc(self, num_bytes: int, _: int) -> int:
        return self._allocate(self.pinned_memory, num_bytes)

    def _cu_mem_free_host(self, address: int) -> Status | None:
        return self._free(self.pinned_memory, address)

    def _cu_mem_host_register(self, address: int, num_bytes: int, _: int) -> None:
        self.registered[address] = num_bytes

    def _cu_mem_host_unregister(self, address: int) -> Status | None:
        found = self.registered.pop(address, None)
        return Status.CUDA_ERROR_NOT_REGISTERED if found is None else None

    def _cu_pointer_get_attribute(self, attribute: str, address: int) -> int | Status:
        on_device = _lies_in(self.device_memory, address)
        if not on_device and not _lies_in(self.registered | self.pinned_memory, address):
            return Status.CUDA_ERROR_INVALID_VALUE
        kinds = self.CUmemorytype
        kind = kinds.CU_MEMORYTYPE_DEVICE if on_device else kinds.CU_MEMORYTYPE_HOST
        return address if attribute == "address" else kind

    _cu_memcpy_hto_dasync = _cu_memcpy_dto_dasync = _copy
    _cu_memcpy_dto_hasync = functools.partialmethod(_copy, to_device=False)

    _cu_memcpy2dasync = _copy_rows

    def _cu_get_proc_address(self, name: bytes, version: int, _: int) -> tuple[int, int]:
        entry = self._entries[name, version]
        there = self.batches or name != b"cuMemcpyBatchAsync"
        return (ctypes.cast(entry, ctypes.c_void_p).value or 0) if there else 0, 0

    def _entry(self, name: str, *given: int | None) -> int:
        """A function as it is called by its address, where 0 is None."""
        status, *_ = getattr(self, name)(*(one or 0 for one in given))
        return int(status)

    def _batch(self, *given: Any) -> int:
        (status,) = self._call("cuMemcpyBatchAsync", self._cu_memcpy_batch_async, *given)
        return int(status)

    def _rows(self, told: int, stream: int | None) -> int:
        fields = _RowCopy.from_address(told)
        copy = SimpleNamespace(**{name: getattr(fields, name) for name, *_ in fields._fields_})
        return self._entry("cuMemcpy2DAsync", copy, stream)  # type: ignore[arg-type]

    def _cu_memcpy_batch_async(self, *given: Any) -> Status | None:
        targets, sources, lengths, count, attributes, first, kinds, stream = given
        assert (kinds, ctypes.c_size_t.from_address(first).value) == (1, 0)
        assert ctypes.c_int.from_address(attributes).value == 1, "sources in stream order"
        arrays = [(ctypes.c_uint64 * count).from_address(at) for at in (targets, sources, lengths)]
        pieces = [tuple(map(int, piece)) for piece in zip(*arrays, strict=True)]
        what = "a copy of pieces"

        def work() -> bool:
            for target, source, size in pieces:
                ranges = ((target, size), (source, size))
                if self._good(what, target, source) and self._in_one(what, *ranges):
                    ctypes.memmove(target, source, size)
            to_device = bool(pieces) and _lies_in(self.device_memory, pieces[0][0])
            sizes = [size for *_, size in pieces]
            self.time.spend(Work("rows", to_device, sum(sizes), max(sizes, default=0)))
            return True

        return self._put(stream or CALLER, work)

    def _cu_memset_d8async(self, to: int, value: int, size: int, stream: int) -> Status | None:
        def work() -> bool:
            if self._good("a clear", to):
                ctypes.memset(to, value, size)
            return True

        return self._put(stream, work)

    def _cu_func_set_attribute(self, *_: Any) -> None:
        pass

    def _cu_launch_kernel(self, handle: int, *given: Any) -> Status | None:
        kernel = list(_NUM_WORDS)[handle - _FIRST_KERNEL]
        *dims, _, stream, parameters, _ = given
        assert all(isinstance(dim, int) and dim > 0 for dim in dims)
        array = (ctypes.c_void_p * (1 + _NUM_WORDS[kernel])).from_address(parameters)
        first, *others = (int(address or 0) for address in array)
        transfer = TransferArgs.from_buffer_copy(
            ctypes.string_at(first, ctypes.sizeof(TransferArgs))
        )
        words = [ctypes.c_uint32.from_address(address).value for address in others]
        self.calls.append(f"kernel {kernel}")
        streams = self.report_stream_of if kernel == "finish" else self.stream_of
        streams[Direction.LOAD if transfer.is_load else Direction.STORE] = stream
        return self._put(stream, lambda: self._carry_out(kernel, transfer, words, dims[0]))


def _side(told: SimpleNamespace, which: str) -> tuple[int, int]:
    """One side of a `CUDA_MEMCPY2D`: its address and pitch."""
    on_host = getattr(told, f"{which}MemoryType") == FakeGpu.CUmemorytype.CU_MEMORYTYPE_HOST
    return getattr(told, which + ("Host" if on_host else "Device")), getattr(told, f"{which}Pitch")


def _lies_in(ranges: dict[int, int], address: int) -> bool:
    return any(start <= address < start + size for start, size in ranges.items())

"""What is left when something fails on the way to a GPU: nothing reused early, nothing leaked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
from tests.transfer.device_rig import DeviceRig, latent, same
from tests.transfer.fake_gpu import FINISH, FakeGpu, Status

from kvferry.errors import (
    DriverError,
    PinError,
    PoolClosedError,
    PoolInUseError,
    SlotOwnershipError,
    TransferFaultError,
)
from kvferry.memory import SlotOwner
from kvferry.transfer import TransferPlan
from kvferry.types import Direction


@pytest.mark.parametrize(
    ("function", "skip"),
    [("cuMemAlloc", 0), ("cuMemHostAlloc", 0), ("cuMemHostAlloc", 1)],
    ids=["device", "upload", "report"],
)
def test_a_command_buffer_that_cannot_grow(gpu: FakeGpu, function: str, skip: int) -> None:
    """The large transfer is refused; a small one after it works, and nothing more is held."""
    num_pages = 1 << 16
    rig = DeviceRig(gpu, latent(1, num_layers=1), num_pages=num_pages + 1, num_slots=num_pages)
    engine = rig.warm_engine()
    passed: list[int] = []

    def too_large(num_bytes: int, *_: int) -> bool:
        if num_bytes <= 64 << 10:
            return False
        passed.append(num_bytes)
        return len(passed) > skip

    rows = rig.rows(num_pages)
    with gpu.failing(function, when=too_large) as refused, pytest.raises(DriverError):
        rig.store(engine, range(num_pages), rows)
    assert len(refused) == 1
    small = rig.store(engine, [5, 9], rows[:2])
    small.wait()
    assert small.verified_pages == 2
    same(rig.on_host([5, 9]), rig.on_device(rows[:2]), "the small transfer")
    large = rig.store(engine, range(num_pages), rows)
    large.wait()
    assert large.verified_pages == num_pages
    same(rig.on_host(range(num_pages)), rig.on_device(rows), "the large transfer")
    engine.close()
    rig.host.close()
    assert set(gpu.holdings.values()) == {0}


@pytest.mark.parametrize("stop", [None, KeyboardInterrupt], ids=["refused", "interrupted"])
@pytest.mark.parametrize(
    ("function", "which"),
    [("cuMemFree", 0), ("cuMemFreeHost", 0), ("cuMemFreeHost", 1), ("cuMemFree", 1)],
    ids=["device", "upload", "report", "sums"],
)
def test_a_command_buffer_that_grew_cannot_free_the_old_memory(
    gpu: FakeGpu, function: str, which: int, stop: type[BaseException] | None
) -> None:
    """The large transfer is refused; those after it use the new memory, none what is freed."""
    num_pages = 70_000  # sums grow, too
    rig = DeviceRig(gpu, latent(1, num_layers=1), num_pages=num_pages + 1, num_slots=num_pages)
    engine = rig.warm_engine()
    rows = rig.rows(num_pages)
    passed: list[int] = []

    def this_one(address: int) -> bool:
        passed.append(int(address))
        if len(passed) != which + 1:
            return False
        if stop is not None:
            raise stop
        return True

    with (
        gpu.failing(function, Status.CUDA_ERROR_INVALID_VALUE, when=this_one),
        pytest.raises(stop or DriverError),
    ):
        rig.store(engine, range(num_pages), rows)
    assert len(passed) > which
    lost = set(passed)
    for pages in (2, num_pages):
        stored = rig.store(engine, range(pages), rows[:pages])
        commands = stored.held.commands  # type: ignore[attr-defined]
        assert not lost & {commands._upload.address, commands._report.address, commands.sums}
        stored.wait()
        assert stored.verified_pages == pages
        same(rig.on_host(range(pages)), rig.on_device(rows[:pages]), f"{pages} pages")
    engine.close()
    rig.host.close()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("launched", [0, 1, 2])
def test_an_interrupt_between_launches(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException], launched: int
) -> None:
    """It surfaces; what was enqueued keeps its buffer, its lease and its slots until it is over."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "cpu")  # in compiled code there is no between
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    rows = rig.rows(4)
    rig.store(engine, [0, 1, 2, 3], rows).wait()
    others = rig.rows(4, besides=rows)
    wanted = rig.on_device(others)
    count = [0]

    def interrupt(*_: object) -> None:
        count[0] += 1
        if count[0] > launched:
            raise stop

    load_stream = gpu.stream_of[Direction.LOAD]
    gpu.hold()
    gpu.hooks["cuLaunchKernel"] = interrupt
    with pytest.raises(stop):
        rig.load(engine, [0, 1, 2, 3], rows)
    del gpu.hooks["cuLaunchKernel"]
    assert gpu.num_pending(load_stream) > launched
    stored = rig.store(engine, [4, 5, 6, 7], others)
    assert rig.pool.num_leases == 2
    with pytest.raises(PoolInUseError):
        rig.host.close()
    # The interrupted load goes first, and must not find the store's indices in its buffer.
    gpu.release(load_stream)
    gpu.release()
    stored.wait()
    assert stored.verified_pages == 4
    same(rig.on_device(others), wanted, "rows that were only read")
    same(rig.on_host([4, 5, 6, 7]), wanted, "what was stored")
    rig.load(engine, [0, 1, 2, 3], rows).wait()
    assert rig.pool.num_leases == 0
    engine.close()
    rig.host.close()


@pytest.mark.parametrize("nth", range(8))
def test_any_event_that_cannot_be_recorded(gpu: FakeGpu, nth: int) -> None:
    """The transfer fails or is whole, and the pool is leased until its work is over."""
    rig = DeviceRig(gpu, latent(num_layers=3))
    engine = rig.warm_engine()
    rows = rig.rows(2)
    count = iter(range(1 << 30))
    gpu.hold(gpu.stream_of[Direction.STORE])
    with gpu.failing("cuEventRecord", when=lambda *_: next(count) == nth) as refused:
        try:
            stored = rig.store(engine, [1, 2], rows)
        except DriverError:
            stored = None
    pending = gpu.num_pending(gpu.stream_of[Direction.STORE])
    assert rig.pool.num_leases == 1 or not pending
    if pending:
        with pytest.raises(PoolInUseError):
            rig.host.close()
    other = rig.rows(2, besides=rows)
    again = rig.store(engine, [3, 4], other)
    assert rig.pool.num_leases == 2 or not pending
    gpu.release()
    again.wait()
    assert again.verified_pages == 2
    same(rig.on_host([3, 4]), rig.on_device(other), "the transfer after it")
    if stored is not None:
        failed = pytest.raises(TransferFaultError, match="OUT_OF_MEMORY")
        with failed if refused else contextlib.nullcontext():
            stored.wait()
        assert stored.verified_pages == (0 if refused else 2)
    assert rig.pool.num_leases == 0
    engine.close()
    rig.host.close()


def test_a_transfer_whose_end_nobody_can_tell(gpu: FakeGpu) -> None:
    """It has failed, and what it may still use is nobody else's, even once the engine is closed."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    rows = rig.rows(2)
    lost = Status.CUDA_ERROR_LAUNCH_FAILED
    gpu.hold(gpu.stream_of[Direction.STORE])

    def last(*_: object) -> bool:
        return gpu.kernels[-1] == "finish"

    launched = len(gpu.kernels)
    with (
        gpu.failing("cuStreamSynchronize", lost),
        gpu.failing("cuEventRecord", lost, when=lambda *_: last() and len(gpu.kernels) > launched),
    ):
        stored = rig.store(engine, [0, 1], rows)
    assert gpu.num_pending()
    assert isinstance(stored.error, TransferFaultError)
    with pytest.raises(TransferFaultError, match="LAUNCH_FAILED"):
        stored.wait()
    loaded = rig.load(engine, [5], rig.rows(1, besides=rows))
    loaded.wait()
    assert loaded.bad_pages == (0,)
    with pytest.raises(SlotOwnershipError, match="slot 1 "):
        rig.pool.free([1], SlotOwner.INDEX)
    engine.close()
    assert rig.pool.num_leases == 1
    with pytest.raises(PoolInUseError):
        rig.host.close()
    # Should it go on, the fixture finds out whether anything was gone.
    gpu.release()
    assert gpu.num_pending() == 0


@pytest.mark.parametrize(
    "function",
    ["cuMemcpyHtoDAsync", "cuLaunchKernel", "cuMemcpyDtoHAsync", "cuStreamWaitEvent"],
)
def test_any_call_that_the_driver_refuses(gpu: FakeGpu, function: str) -> None:
    """The handle says why, nothing is verified, and the engine goes on."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    rows = rig.rows(2)
    with gpu.failing(function, Status.CUDA_ERROR_LAUNCH_FAILED) as refused:
        stored = rig.store(engine, [0, 1], rows)
    assert refused
    with pytest.raises(TransferFaultError, match="LAUNCH_FAILED"):
        stored.wait()
    assert stored.verified_pages == 0
    assert rig.pool.num_leases == 0
    again = rig.store(engine, [0, 1], rows)
    again.wait()
    assert again.verified_pages == 2
    engine.close()
    rig.host.close()
    assert set(gpu.holdings.values()) == {0}


def test_sums_that_nobody_finished(gpu: FakeGpu) -> None:
    """What a transfer added up before it failed is not in the digests of the next."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    rows = rig.rows(2)
    with gpu.failing("cuLaunchKernel", when=lambda kernel, *_: kernel == FINISH) as refused:
        stored = rig.store(engine, [0, 1], rows)
    assert refused
    assert stored.done
    for _ in range(2):  # a transfer that cannot clear them fails, and leaves it to the next
        with gpu.failing("cuMemsetD8Async", Status.CUDA_ERROR_LAUNCH_FAILED) as refused:
            again = rig.store(engine, [0, 1], rows)
        assert refused
        with pytest.raises(TransferFaultError, match="LAUNCH_FAILED"):
            again.wait()
    rig.store(engine, [0, 1], rows).wait()
    loaded = rig.load(engine, [0, 1], rows)
    loaded.wait()
    assert loaded.verified_pages == 2
    engine.close()
    rig.host.close()


def test_an_event_that_cannot_be_made(gpu: FakeGpu) -> None:
    """Whichever it is of a transfer's: no lease stays, and later transfers work."""
    for nth in range(8):
        rig = DeviceRig(gpu)
        engine = rig.engine()
        rows = rig.rows(2)
        count = iter(range(1 << 30))
        with (
            gpu.failing("cuEventCreate", when=lambda *_, n=nth, c=count: next(c) == n),
            contextlib.suppress(DriverError),
        ):
            rig.store(engine, [0, 1], rows)
        again = rig.store(engine, [0, 1], rows)
        again.wait()
        assert again.verified_pages == 2
        assert rig.pool.num_leases == 0
        engine.close()
        rig.host.close()
        assert set(gpu.holdings.values()) == {0}


def test_a_closed_pool_a_hundred_times(gpu: FakeGpu) -> None:
    """Refused submits take nothing with them."""
    rig = DeviceRig(gpu, registered=True)
    engine = rig.warm_engine()
    rows = rig.rows(2)
    rig.host.close()
    before = gpu.holdings
    for _ in range(100):
        with pytest.raises(PoolClosedError):
            rig.store(engine, [0, 1], rows)
    assert gpu.holdings == before
    engine.close()
    assert set(gpu.holdings.values()) == {0}


@pytest.mark.parametrize(
    "function", ["cuMemAlloc", "cuMemHostAlloc", "cuMemcpyHtoDAsync", "cuStreamSynchronize"]
)
def test_a_first_transfer_that_is_refused(gpu: FakeGpu, function: str) -> None:
    """Failing in whichever of its first calls, it leaves nothing; then it works."""
    for nth in range(4):
        rig = DeviceRig(gpu)
        engine = rig.engine()
        rows = rig.rows(2)
        seen = []
        for _ in range(6):
            count = iter(range(1 << 30))
            with gpu.failing(function, when=lambda *_, n=nth, c=count: next(c) >= n) as refused:
                try:
                    stored = rig.store(engine, [0, 1], rows)
                except DriverError:
                    assert refused
                else:
                    failed = pytest.raises(TransferFaultError)
                    with failed if refused else contextlib.nullcontext():
                        stored.wait()
            assert rig.pool.num_leases == 0
            seen.append(gpu.holdings)
        assert seen[-1] == seen[-2] == seen[-3]
        rig.store(engine, [0, 1], rows).wait()
        engine.close()
        rig.host.close()
        assert set(gpu.holdings.values()) == {0}


def test_span_tables_are_bounded_while_a_transfer_is_in_flight(gpu: FakeGpu) -> None:
    """Kinds of plans come and go while one load is stuck, and the load's own table stays."""
    rig = DeviceRig(gpu, latent(64, num_layers=9), num_slots=2)
    engine = rig.warm_engine()
    rows = rig.rows(1)
    rig.store(engine, [0], rows).wait()
    kept = rig.on_device(rows)
    others = rig.rows(1, besides=rows)
    rig.poison()
    held = []
    gpu.hold(gpu.stream_of[Direction.LOAD])
    loaded = rig.load(engine, [0], rows)
    for mask in range(1, 300):
        layers = [layer for layer in range(9) if mask >> layer & 1]
        rig.store(engine, [1], others, layers=layers).wait()
        held.append(len(gpu.device_memory))
    # As many as are kept at all, which is fewer than were asked for.
    assert held[-1] == held[150]
    gpu.release()
    loaded.wait()
    assert loaded.verified_pages == 1
    same(rig.on_device(rows), kept, "what was loaded")
    engine.close()


@pytest.mark.parametrize("registered", [False, True], ids=["own", "registered"])
def test_a_pool_that_could_not_be_closed_takes_no_transfer(gpu: FakeGpu, registered: bool) -> None:
    """It is not pinned any more, as far as anybody knows: no kernel is sent there."""
    rig = DeviceRig(gpu, registered=registered)
    engine = rig.warm_engine()
    plan = TransferPlan.store(rig.geometry, host_slots=[0], device_slots=rig.rows(1))
    with (
        gpu.failing("cuMemHostUnregister", Status.CUDA_ERROR_INVALID_VALUE),
        pytest.raises(PinError),
    ):
        rig.host.close()
    launched = len(gpu.kernels)
    with pytest.raises(PinError):
        engine.store(plan, stream=0)
    assert len(gpu.kernels) == launched
    engine.close()
    rig.host.close()


def _in_thread(work: Callable[[], object], failures: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        except BaseException as failure:  # noqa: BLE001 (the test reports it)
            failures.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_two_threads_settle_one_transfer(gpu: FakeGpu) -> None:
    """One waits for its handle and another submits: both see the end, one gives the lease back."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    rows = rig.rows(1)
    with gpu.held():
        handle = rig.store(engine, [0], rows)
        meeting = threading.Barrier(2)
        failures: list[BaseException] = []

        def meet(_: int) -> None:
            # Where settling is serial only one of the two comes here.
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(0.2)

        gpu.hooks["cuEventQuery"] = meet
        gpu.release()
        waiting = _in_thread(handle.wait, failures)
        submitted = rig.store(engine, [1], rows)
        waiting.join(20)
    del gpu.hooks["cuEventQuery"]
    assert not waiting.is_alive()
    submitted.wait()
    assert failures == []
    assert rig.pool.num_leases == 0
    engine.close()
    rig.host.close()

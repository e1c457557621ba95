"""The fake GPU is no more lenient than a GPU where orders are concerned."""

from __future__ import annotations

from tests.transfer.fake_gpu import FakeGpu

from kvferry.kernels.jit import Driver, Event, Stream


def test_a_wait_is_for_the_record_that_there_was() -> None:
    """An event that is recorded anew in another stream lets nobody go who waits for it in the
    first; it is itself reached when its last record is."""
    gpu = FakeGpu()
    context = Driver(gpu, "13.0.0").context(0)
    with context.current():
        slow, fast, waiting = (Stream(context) for _ in range(3))
        event, seen = Event(context), []
        gpu.hold(slow.handle)
        event.record(slow.handle)
        waiting.wait_for(event)
        gpu.enqueue(waiting.handle, lambda: seen.append("waited"))
        event.record(fast.handle)
        assert event.reached
        assert seen == []
        fast.wait_for(event)
        gpu.enqueue(fast.handle, lambda: seen.append("went on"))
        assert seen == ["went on"]
        gpu.release()
        assert seen == ["went on", "waited"]

"""A pool that another process made: the same slots and digests, and no account of them."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from tests.memory.fake_pins import FakePins

from kvferry.errors import ConfigError, PoolClosedError, PoolInUseError
from kvferry.geometry import Geometry, Plane
from kvferry.memory import AttachedHostPool, HostPool

_PLANES = (
    Plane(name="latent", num_layers=2, element_size=33),
    Plane(name="scale", num_layers=1, element_size=4, rows_per_page=1),
)
_GEOMETRY = Geometry(planes=_PLANES, page_size=4)


def test_both_see_the_same_slots_and_digests() -> None:
    """At the same rows of every plane, whichever of the two wrote them."""
    with (
        HostPool(_GEOMETRY, num_slots=3, shared=True) as made,
        AttachedHostPool(_GEOMETRY, made.fd, num_slots=3) as attached,
    ):
        made.allocate(3)
        rng = np.random.default_rng(1)
        for slot in range(3):
            with made.slot_view(slot) as page:
                page[:] = rng.bytes(len(page))
        made.digests[:] = rng.integers(1, 1 << 63, made.digests.shape, dtype=np.uint64)
        assert np.array_equal(attached.digests, made.digests)
        assert (attached.num_slots, attached.num_bytes) == (made.num_slots, made.num_bytes)
        assert attached.backing.shared
        moved = attached.view.view("latent", 0).address - made.view.view("latent", 0).address
        assert moved
        for name, layers in made.view.layers.items():
            for ours, theirs in zip(layers, attached.view.layers[name], strict=True):
                assert theirs.address - ours.address == moved
                assert (theirs.num_rows, theirs.element_size) == (ours.num_rows, ours.element_size)
        attached.digests[2, 0] = 5
        assert made.digests[2, 0] == 5
        made.free(range(3))


def test_attaching_does_not_clear_what_is_there() -> None:
    """Unlike allocating, which takes digests away."""
    with HostPool(_GEOMETRY, num_slots=2, shared=True) as made:
        made.digests[:] = 9
        with AttachedHostPool(_GEOMETRY, made.fd, num_slots=2) as attached:
            assert (attached.digests == 9).all()
            attached.check_slots(np.array([0, 1]))  # who has which is known elsewhere
        assert (made.digests == 9).all()


def test_it_is_pinned_for_itself() -> None:
    """Each process registers the memory where it has it, and lets go of that alone."""
    with HostPool(_GEOMETRY, num_slots=2, shared=True) as made:
        pins = FakePins(shift=1 << 46)
        made.pin(pins)
        attached = AttachedHostPool(_GEOMETRY, made.fd, num_slots=2)
        registration = attached.pin(pins)
        assert attached.pin(pins) is registration
        address = attached.view.view("latent", 0).address
        assert registration.device_address(address) == address + (1 << 46)
        assert len(pins.pinned) == 2
        attached.close()
        assert len(pins.pinned) == 1
        assert made.registration is not None


def test_it_stays_open_while_it_is_used() -> None:
    """A lease, or an array over its digests, keeps it; then it closes, once."""
    with HostPool(_GEOMETRY, num_slots=2, shared=True) as made:
        attached = AttachedHostPool(_GEOMETRY, made.fd, num_slots=2)
        assert "another process" in repr(attached)
        attached.acquire()
        with pytest.raises(PoolInUseError, match="1 transfers"):
            attached.close()
        attached.release()
        held = attached.digests
        with pytest.raises(PoolInUseError):
            attached.close()
        assert held.shape == (2, 3)
        del held
        attached.close()
        attached.close()
        assert "closed" in repr(attached)
        for use in (lambda: attached.view, lambda: attached.digests, attached.acquire):
            with pytest.raises(PoolClosedError, match="attach again"):
                use()


def test_memory_of_another_size() -> None:
    """A pool of more slots than there are is refused, and leaves nothing open."""
    with HostPool(_GEOMETRY, num_slots=2, shared=True) as made:
        files = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(ConfigError, match="the shared memory has"):
            AttachedHostPool(_GEOMETRY, made.fd, num_slots=4000)
        gc.collect()
        assert len(list(Path("/proc/self/fd").iterdir())) == files
        os.fstat(made.fd)

"""The parts that need no pool: ways through memory, calls, leases; answers that no pool gives."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.storage.storage_rig import key_of, object_of, put

from kvferry.errors import MissingDependencyError
from kvferry.storage import ItemStatus, open_backend
from kvferry.storage.mooncake import MooncakeBackend, backend, codes
from kvferry.storage.mooncake.calls import CallError, Calls
from kvferry.storage.mooncake.leased import LeasedKeys
from kvferry.storage.mooncake.lent import LentMemory, Rooms, Way
from kvferry.storage.raw_memory import view_of


class _Client:
    """A pool in a dict; `script` has what calls of a method answer for their first key."""

    def __init__(self) -> None:
        self.script: dict[str, list[int]] = {}
        self.sizes: dict[str, int] = {}
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.ended = 0

    def _codes(self, method: str, names: list[str], good: Callable[[str], int]) -> list[int]:
        self.calls.append(method)
        scripted = self.script.get(method)
        first = scripted.pop(0) if scripted else None
        return [
            first if first is not None and number == 0 else good(name)
            for number, name in enumerate(names)
        ]

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self.registered[buffer_ptr] = size
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        del self.registered[buffer_ptr]
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return self._codes("exist", keys, lambda name: int(name in self.sizes))

    def get_size(self, key: str) -> int:
        return self.sizes.get(key, codes.NOT_FOUND)

    def batch_remove(self, keys: list[str]) -> list[int]:
        return self._codes(
            "remove", keys, lambda name: 0 if self.sizes.pop(name, 0) else codes.NOT_FOUND
        )

    def batch_get_into_multi_buffers(
        self, keys: list[str], _at: list[list[int]], _sizes: list[list[int]]
    ) -> list[int]:
        return self._codes("get", keys, lambda name: self.sizes.get(name, codes.NOT_FOUND))

    def batch_put_from_multi_buffers(
        self, keys: list[str], _at: list[list[int]], sizes: list[list[int]], _config: Any
    ) -> list[int]:
        lengths = dict(zip(keys, map(sum, sizes), strict=True))

        def keep(name: str) -> int:
            self.sizes.setdefault(name, lengths[name])
            return 0

        return self._codes("put", keys, keep)

    def close(self) -> int:
        self.ended += 1
        return 0


@pytest.fixture
def client() -> _Client:
    """An empty one."""
    return _Client()


@pytest.fixture
def made(client: _Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeBackend]:
    """A backend of that client."""
    monkeypatch.setattr(backend, "connect", lambda *_, **__: (client, None))
    made = MooncakeBackend(deadline_secs=5, buffer_bytes=1 << 20)
    yield made
    made.close()
    assert client.ended == 1
    assert not client.registered


def _get(made: MooncakeBackend, numbers: list[int], num_bytes: int) -> list[ItemStatus]:
    into = np.zeros((len(numbers), num_bytes), dtype=np.uint8)
    at = int(into.ctypes.data)
    found = made.read_into(
        [key_of(number) for number in numbers],
        [[(at + row * num_bytes, num_bytes)] for row in range(len(numbers))],
    )
    return [one.status for one in found]


def test_a_put_that_failed_is_tried_on_other_memory(made: MooncakeBackend, client: _Client) -> None:
    """Only what failed goes again, a few times, and then it has failed."""
    client.script["put"] = [-800, -800]
    assert [one.status for one in put(made, [1, 2], 100)] == [ItemStatus.OK] * 2
    assert client.calls == ["put"] * 3
    assert made.stats().counts["tried_again"] == 2
    client.script["put"] = [-800] * 10
    assert [one.status for one in put(made, [3, 4], 100)] == [ItemStatus.FAILED, ItemStatus.OK]
    assert client.calls == ["put"] * 7
    assert made.stats().objects == 3


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (-200, ItemStatus.REFUSED), (-600, ItemStatus.FAILED), (-900, ItemStatus.FAILED),
        (-901, ItemStatus.FAILED), (-705, ItemStatus.OK), (-12345, ItemStatus.FAILED),
    ],
)  # fmt: skip
def test_answers_to_a_put(
    made: MooncakeBackend, client: _Client, code: int, status: ItemStatus
) -> None:
    """Each is one result, with a reason, and no second try."""
    client.script["put"] = [code]
    one, other = put(made, [1, 2], 100)
    assert (one.status, other.status) == (status, ItemStatus.OK)
    assert one.ok or str(code) in one.reason
    assert client.calls == ["put"]


@pytest.mark.parametrize(
    ("codes_given", "status"),
    [
        ([-704], ItemStatus.MISS), ([-703], ItemStatus.MISS), ([-707], ItemStatus.OK),
        ([-707] * 4, ItemStatus.FAILED), ([-800], ItemStatus.FAILED), ([-901], ItemStatus.FAILED),
        ([0], ItemStatus.FAILED), ([99], ItemStatus.FAILED), ([101], ItemStatus.FAILED),
        ([-1], ItemStatus.FAILED),
    ],
)  # fmt: skip
def test_answers_to_a_get(
    made: MooncakeBackend, client: _Client, codes_given: list[int], status: ItemStatus
) -> None:
    """A length that is not the object's is no success, whatever else it is."""
    put(made, [1, 2], 100)
    client.script["get"] = list(codes_given)
    assert _get(made, [1, 2], 100) == [status, ItemStatus.OK]


def test_a_batch_with_too_few_answers(made: MooncakeBackend, client: _Client) -> None:
    """All of it has failed."""
    client._codes = lambda *_: []  # type: ignore[method-assign]
    assert [one.status for one in put(made, [1, 2], 100)] == [ItemStatus.FAILED] * 2
    assert _get(made, [1, 2], 100) == [ItemStatus.FAILED] * 2
    assert made.contains([key_of(1)]) == [False]
    assert made.delete([key_of(1)])[0].status is ItemStatus.FAILED
    assert made.stats().errors["odd_answer"] == 4


def test_removals_are_tried_later_each_time() -> None:
    """Half a second first, then twice as long, sixteen seconds at most; what is replaced stays."""
    now = [0.0]
    leased = LeasedKeys(lambda: now[0])
    leased.add([b"a", b"b"])
    leased.discard([b"b"])
    waits = []
    for _ in range(8):
        assert leased.due(9) == []
        begun = now[0]
        while not leased.due(9):
            now[0] += 0.25
        waits.append(now[0] - begun)
        leased.postpone([b"a", b"b"])
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    assert leased.hidden([b"a", b"b"]) == [True, False]


def test_what_is_lent() -> None:
    """A part counts as lent only where all of it is."""
    lent = LentMemory()
    lent.add(1000, 100)
    lent.add(5000, 10)
    asked = [(1000, 100), (1099, 1), (1000, 101), (999, 2), (5000, 10), (5010, 1), (3000, 1)]
    assert [lent.covers(*one) for one in asked] == [True, True, False, False, True, False, False]
    assert lent.drop(1000)
    assert not lent.drop(1001)
    assert not lent.covers(1000, 1)
    assert lent.all() == [5000]


def test_the_way_of_an_object() -> None:
    """Neighbours that are not lent become one part; bytes go and come in order."""
    content = object_of(1, 300)
    source, target = content.copy(), np.zeros(300, dtype=np.uint8)
    lent = LentMemory()
    lent.add(int(source.ctypes.data) + 100, 50)
    lent.add(int(target.ctypes.data) + 100, 50)
    cuts = [(0, 10), (10, 90), (90, 90), (90, 100), (100, 150), (150, 300)]
    rooms = Rooms(4 * 4096)
    room = rooms.take(0)
    assert room is not None

    def way(memory: Any) -> Way:
        at = int(memory.ctypes.data)
        # The second part is cut so that it touches, and does not lie in, what is lent.
        return Way([(at + begin, end - begin) for begin, end in cuts], lent)

    out = way(source)
    addresses, lengths = out.through(room.address)
    assert lengths == [100, 50, 150]
    assert addresses == [room.address, int(source.ctypes.data) + 100, room.address + 128]
    assert (out.num_bytes, out.num_in_place, out.staged_bytes) == (300, 1, 128 + 192)
    out.copy_out()
    for begin, end, at in ((0, 100, addresses[0]), (150, 300, addresses[2])):
        assert bytes(view_of(at, end - begin)) == content[begin:end].tobytes()
    back = way(target)
    back.through(room.address)
    target[100:150] = source[100:150]  # as the library would
    back.copy_in()
    assert (target == content).all()


def test_rooms_are_waited_for() -> None:
    """There are four; the fifth comes when one is given back, or not in time."""
    rooms = Rooms(4 * 4096)
    taken = [rooms.take(0) for _ in range(4)]
    assert len({room.address for room in taken if room}) == 4
    assert rooms.take(0.01) is None
    assert taken[0] is not None
    rooms.give_back(taken[0])
    assert rooms.take(0) == taken[0]


def test_calls_end_the_library_once_behind_the_last() -> None:
    """Also when two of them end while it is being closed."""
    ended: list[int] = []
    release, inside = threading.Event(), threading.Barrier(3)
    calls = Calls(0.2, lambda: ended.append(calls.num_running))

    def work() -> None:
        inside.wait(60)
        release.wait(60)

    threads = [threading.Thread(target=lambda: calls.here(work), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(60)
    calls.close()
    assert ended == []
    with pytest.raises(CallError, match="closed"):
        calls.here(lambda: None)
    assert not calls.pause(60)
    release.set()
    for thread in threads:
        thread.join(60)
    assert calls._ended.wait(60)
    calls.close()
    assert ended == [0]


def test_a_late_call_gives_back_what_it_used() -> None:
    """When it returns, and not before; also when it raises."""
    release, back = threading.Event(), threading.Semaphore(0)
    calls = Calls(0.05, lambda: None)

    def work() -> None:
        release.wait(60)
        raise TimeoutError("of its own")

    for _ in range(2):
        with pytest.raises(CallError, match="no answer"):
            calls.aside(work, back.release)
    assert not back.acquire(blocking=False)
    with pytest.raises(CallError, match="no other is started"):
        calls.aside(work, back.release)
    release.set()
    assert back.acquire(timeout=60)
    assert back.acquire(timeout=60)
    with pytest.raises(TimeoutError, match="of its own"):
        calls.aside(work, back.release)
    calls.close()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command."""
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(MissingDependencyError, match="mooncake"):
        open_backend("mooncake")

"""The bookkeeping of the file backend, against a plain list."""

from __future__ import annotations

import random

import pytest

from kvferry.storage.file_index import FileIndex, KnownFile


def _file(number: int, size: int = 10, used: int = 0) -> KnownFile:
    return KnownFile(b"%d" % number, size, used)


@pytest.mark.parametrize("seed", range(10))
def test_fuzz_against_a_list(seed: int) -> None:
    """Sizes, order and reservations are those of a list that is searched for everything."""
    rng = random.Random(seed)
    index, files, reserved = FileIndex(500), list[KnownFile](), 0
    stuck: dict[bytes, KnownFile] = {}
    for now in range(1, 3001):
        number, size = rng.randrange(30), rng.randrange(1, 40)
        key, action = b"%d" % number, rng.randrange(7)
        known = next((one for one in files if one.key == key), None)
        if action == 0:
            has = index.reserve(size)
            taken = sum(one.num_bytes for one in [*files, *stuck.values()]) + reserved
            assert has is (taken + size <= 500)
            if has and rng.random() < 0.8:
                index.add(KnownFile(key, size, now), from_reserved=size)
                files = [one for one in files if one.key != key] + [KnownFile(key, size, now)]
                stuck.pop(key, None)
            elif has:
                index.unreserve(size)
        elif action == 1:
            index.touch(key, now, save_after_ns=10**9)
            if known:
                files.remove(known)
                files.append(known)
        elif action == 2:
            expected = known or stuck.get(key)
            assert index.forget(key) == (expected.num_bytes if expected else None)
            files = [one for one in files if one.key != key]
            stuck.pop(key, None)
        elif action in (3, 4):
            victim = index.take_victim()
            assert victim == (files[0] if files else None)
            if victim is not None:
                files.pop(0)
                assert not index.has(victim.key)
                if rng.random() < 0.3:
                    index.put_back(victim)
                    stuck[victim.key] = victim
                else:
                    assert index.forget(victim.key) == victim.num_bytes
        else:
            assert index.has(key) is (known is not None or key in stuck)
        usage = index.usage()
        assert usage.objects == len(files) + len(stuck)
        assert usage.num_bytes == sum(one.num_bytes for one in [*files, *stuck.values()])
        assert usage.undeletable == len(stuck)


def test_a_victim_that_is_written_anew_is_no_victim() -> None:
    """A file published while its old one was about to go is counted once and stays."""
    index = FileIndex(100)
    index.load([_file(1, 10), _file(2, 20, 1)])
    victim = index.take_victim()
    assert victim == _file(1, 10)
    assert index.usage().num_bytes == 30
    index.add(_file(1, 15, 5))
    assert index.usage().num_bytes == 35
    index.put_back(victim)
    assert (index.usage().undeletable, index.usage().num_bytes) == (0, 35)


def test_reconcile_takes_over_what_is_there() -> None:
    """New files come in as recent, files that are gone go out, others stay where they are."""
    index = FileIndex(1000)
    index.load(_file(number, 10, number) for number in range(6))
    there = [_file(0, 10, 0), _file(2, 10, 50), _file(4, 99, 4), _file(8, 10, 8)]
    even = index.reconcile(there, lambda key: int(key) % 2 == 0)
    assert even == (1, 0)
    assert list(index.known()) == [b"0", b"1", b"3", b"5", b"2", b"4", b"8"]
    assert index.usage().num_bytes == 6 * 10 + 99
    assert index.reconcile([], lambda key: int(key) % 2 == 1) == (0, 3)
    assert list(index.known()) == [b"0", b"2", b"4", b"8"]

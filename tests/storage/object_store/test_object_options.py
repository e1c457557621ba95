"""What the backend is opened with, what it calls objects, and two caches over one bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.storage.object_store.s3_rig import Server, opened
from tests.storage.storage_rig import key_of, put

from kvferry import Geometry, KVFerry, Namespace, Plane, PoolView
from kvferry.errors import ConfigError, MissingDependencyError, StorageError
from kvferry.storage import MAX_KEY_BYTES, ItemStatus, open_backend
from kvferry.storage.object_store import ObjectStoreBackend


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("ftp://host/x", {}, r"ftp://host/x' is of no object store: give s3://"),
        ("/some/folder", {}, "is of no object store"),
        ("s3://bucket", {"colour": "red"}, "does not take that setting"),
        ("s3://bucket", {"deadline_secs": 0}, "deadline_secs=0: give seconds above 0"),
        ("s3://bucket", {"deadline_secs": float("nan")}, "deadline_secs=nan"),
        ("s3://bucket", {"num_requests": 0}, "num_requests=0: give at least 1"),
        ("s3://bucket", {"part_bytes": 1}, "part_bytes=1: give at least 5242880"),
        ("memory:///", {"region": "x"}, "takes no settings, and has region"),
    ],
)
def test_what_is_refused(url: str, options: dict[str, Any], words: str) -> None:
    """Before anything is asked of a store, with the value and the next step."""
    with pytest.raises(ConfigError, match=words):
        open_backend("object_store", url=url, **options)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """Under a file, say."""
    (tmp_path / "file").write_text("")
    with pytest.raises((ConfigError, StorageError), match="cannot be opened"):
        ObjectStoreBackend((tmp_path / "file" / "store").as_uri())


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("kvferry.storage.object_store.client.importlib.import_module", absent)
    with pytest.raises(MissingDependencyError, match=r"pip install 'kvferry\[object-store\]'"):
        ObjectStoreBackend("memory:///")


def test_names(tmp_path: Path) -> None:
    """A folder a beginning, below the version; the longest key fits, a longer one is refused."""
    backend = ObjectStoreBackend(tmp_path.as_uri())
    assert [one.ok for one in put(backend, range(3), 100)] == [True] * 3
    long = b"\xff" * MAX_KEY_BYTES
    content = np.zeros(8, dtype=np.uint8)
    place = [[(int(content.ctypes.data), 8)]]
    assert backend.write_from([long], place)[0].ok
    assert backend.write_from([long + b"x"], place)[0].status is ItemStatus.REFUSED
    names = sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file())
    assert names == sorted(
        f"v1/{key.hex()[:2]}/{key.hex()}" for key in (*(key_of(n) for n in range(3)), long)
    )
    backend.close()


_GEOMETRY = Geometry(planes=(Plane(name="k", num_layers=2, element_size=24),), page_size=4)


def test_two_caches_over_one_bucket(server: Server, request: pytest.FixtureRequest) -> None:
    """What one has stored the other loads, checked; and a damaged object is a miss."""
    prompt = list(range(20))
    rng = np.random.default_rng(1)
    sent = [rng.integers(0, 256, (40, 24), dtype=np.uint8) for _ in range(2)]

    def cache(rows: list[Any]) -> KVFerry:
        return KVFerry(
            _GEOMETRY,
            PoolView.from_tensors(_GEOMETRY, {"k": rows}),
            namespace=Namespace(
                model="m", revision="1", dtype="u8", geometry=_GEOMETRY.fingerprint
            ),
            host={"num_bytes": "64KiB"},
            load={"threshold_tokens": 1},
            prefetch={"policy": "wait_complete", "threshold_tokens": 1},
            storage=opened(server.endpoint, request.node.name),
        )

    with cache(sent) as first:
        first.store(prompt, device_slots=np.arange(20)).wait(30)
        assert first.flush(30).complete
        keys = first.keys(prompt)
    other = opened(server.endpoint, request.node.name)
    assert other.contains(keys) == [True] * 5
    junk = np.zeros(5000, dtype=np.uint8)
    for number, expected in ((5, 5 * 4), (3, 3 * 4)):
        if number < 5:
            assert other.write_from([keys[number]], [[(int(junk.ctypes.data), junk.size)]])[0].ok
        got = [np.zeros((40, 24), dtype=np.uint8) for _ in range(2)]
        with cache(got) as second:
            second.prefetch(prompt).wait(30)
            with second.match(prompt) as found:
                assert found.num_tokens == expected
                loaded = second.load(found, device_slots=np.arange(found.num_tokens))
                loaded.wait(30)
            assert loaded.usable_tokens == expected
            for one, wanted in zip(got, sent, strict=True):
                assert (one[:expected] == wanted[:expected]).all()
    other.close()

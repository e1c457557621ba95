"""What makes KV differ makes keys differ: models, adapters, salts, shards, pictures."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from tests.index.index_rig import NAMESPACE, eight_bytes

from kvferry import Geometry, Plane
from kvferry.index import ContentSpan, Namespace, page_keys


def _variants(**changes: Sequence[str]) -> list[Namespace]:
    return [
        dataclasses.replace(NAMESPACE, **dict(zip(changes, values, strict=True)))
        for values in itertools.product(*changes.values())
    ]


def _assert_separate(namespaces: Sequence[Namespace]) -> None:
    """No two of these share a root or any key of one prompt."""
    tokens = list(range(128))
    assert len({space.root() for space in namespaces}) == len(namespaces)
    keys = [key for space in namespaces for key in page_keys(space, tokens, 64)]
    assert len(set(keys)) == 2 * len(namespaces)


def test_adapters_and_salts_are_separate() -> None:
    """Whatever the two are called, also if they are called alike, or their names run together."""
    names = ("", "x", "y", "xy", "x|y", "x\0y", "\0x", "x\0", "lora", "salt", "x,salt=y", "X", "ẋ")
    _assert_separate(_variants(lora=names, salt=names))


def test_a_value_in_another_field_is_another_namespace() -> None:
    """The same text in any one of the fields, or cut elsewhere between two."""
    fields = [field.name for field in dataclasses.fields(Namespace)]
    spaces = [dataclasses.replace(NAMESPACE, **{name: "same"}) for name in fields]
    for first, second in itertools.pairwise(fields):
        for cut in range(1, 4):
            spaces.append(
                dataclasses.replace(NAMESPACE, **{first: "abcd"[:cut], second: "abcd"[cut:]})
            )
    _assert_separate([NAMESPACE, *spaces])


def test_types_of_one_size_are_separate() -> None:
    """bfloat16 and float16 make pages of the same bytes and fingerprint; fp8 does not even that."""

    def shape(size: int) -> str:
        return Geometry(planes=(Plane(name="k", num_layers=2, element_size=size),)).fingerprint

    assert shape(1024) != shape(512)
    spaces = [
        Namespace(model="m", revision="r", dtype=dtype, geometry=geometry)
        for dtype in ("bfloat16", "float16", "float8_e4m3", "float8_e5m2")
        for geometry in (shape(1024), shape(512))
    ]
    _assert_separate(spaces)


def test_geometries_are_separate() -> None:
    """What moves bytes within a page is in the fingerprint, and so in the key."""
    planes = tuple(Plane(name=name, num_layers=2, element_size=64) for name in ("k", "v"))
    geometries = [
        Geometry(planes=planes),
        Geometry(planes=planes[::-1]),
        Geometry(planes=planes, page_size=32),
        Geometry(planes=planes, span_alignment=4096),
        Geometry(planes=planes[:1]),
        Geometry(planes=tuple(dataclasses.replace(plane, num_layers=3) for plane in planes)),
    ]
    _assert_separate(
        [dataclasses.replace(NAMESPACE, geometry=shape.fingerprint) for shape in geometries]
    )


def test_models_and_revisions_are_separate() -> None:
    """Other weights of the same shape."""
    names = ("m", "m2", "m/r", "r", "r1", "1")
    _assert_separate(_variants(model=names, revision=names))


def test_ranks_share_what_is_replicated_and_nothing_else() -> None:
    """2 × 2 context and tensor parallel ranks: an axis is in the key if bytes differ on it."""
    tokens = list(range(128))

    def keys(context: int, tensor: int, axes: str) -> tuple[bytes, ...]:
        parts = [f"{axis} {at}/2" for axis, at in (("cp", context), ("tp", tensor)) if axis in axes]
        space = dataclasses.replace(NAMESPACE, shard=", ".join(parts))
        return tuple(page_keys(space, tokens, 64))

    grid = list(itertools.product(range(2), range(2)))
    kinds = {"": 1, "cp": 2, "tp": 2, "cp tp": 4}
    for axes, num_kinds in kinds.items():
        assert len({keys(*rank, axes) for rank in grid}) == num_kinds
    everything = {key for axes in kinds for rank in grid for key in keys(*rank, axes)}
    assert len(everything) == 2 * sum(kinds.values())


@pytest.mark.parametrize("count", [1, 15, 16, 17, 300])
@pytest.mark.parametrize("first", [0, 1, 15, 16, 63, 64, 100])
def test_a_picture_is_in_each_page_that_it_touches(first: int, count: int) -> None:
    """Pages before it are the same without it; the ones it touches, and all after, differ."""
    tokens = [9] * 480
    plain = page_keys(NAMESPACE, tokens, 16)
    one, other = (
        page_keys(NAMESPACE, tokens, 16, content=[ContentSpan(first, count, name)])
        for name in (b"one" * 10, b"two" * 10)
    )
    before = first // 16
    assert plain[:before] == one[:before] == other[:before]
    assert len({*plain[before:], *one[before:], *other[before:]}) == 3 * (len(plain) - before)


def test_a_picture_is_hashed_into_every_page_itself() -> None:
    """Each page has the content in its own message, not only in that of the page before."""
    tokens, span = [9] * 64, ContentSpan(0, 64, b"a picture")
    keys = page_keys(NAMESPACE, tokens, 16, content=[span])
    for page in range(1, 4):
        # As if all before were known, and the picture were not.
        without = page_keys(NAMESPACE, tokens[: 16 * (page + 1)], 16, known=keys[:page])
        assert without[page] != keys[page]


def test_a_hundred_thousand_pictures() -> None:
    """Random ids, many of them with the same last two bytes: no two keys are equal."""
    rng = random.Random(4)
    names = {rng.randbytes(16) for _ in range(99_990)}
    names |= {rng.randbytes(14) + b"\xab\xcd" for _ in range(10)}
    assert len({name[-2:] for name in names}) < len(names)
    keys = {page_keys(NAMESPACE, [7], 1, content=[ContentSpan(0, 1, name)])[0] for name in names}
    assert len(keys) == len(names) == 100_000


def test_where_a_picture_lies_and_what_it_is_called() -> None:
    """Place, length, name, number and neighbours of spans are all in the key."""
    tokens = [7] * 8
    contents: list[list[ContentSpan]] = [
        [],
        [ContentSpan(0, 1, b"ab")],
        [ContentSpan(1, 1, b"ab")],
        [ContentSpan(0, 2, b"ab")],
        [ContentSpan(0, 9, b"ab")],
        [ContentSpan(0, 1, b"abc")],
        [ContentSpan(0, 1, b"a"), ContentSpan(1, 1, b"b")],
        [ContentSpan(0, 1, b"b"), ContentSpan(1, 1, b"a")],
        [ContentSpan(0, 1, b"a"), ContentSpan(0, 1, b"b")],
        [ContentSpan(0, 1, b"a"), ContentSpan(0, 1, b"a")],
        [ContentSpan(0, 1, b"a")],
    ]
    keys = [page_keys(NAMESPACE, tokens, 8, content=content)[0] for content in contents]
    assert len(set(keys)) == len(contents)


def test_the_order_of_spans_does_not_matter() -> None:
    """They may come from a set; a span may end, or begin, behind the tokens that there are yet."""
    spans = [ContentSpan(start, 30, bytes([start])) for start in range(0, 100, 10)]
    tokens = list(range(120))
    keys = page_keys(NAMESPACE, tokens, 16, content=spans)
    assert page_keys(NAMESPACE, tokens, 16, content=reversed(spans)) == keys
    assert page_keys(NAMESPACE, tokens[:40], 16, content=spans) == keys[:2]


def test_a_content_hash_is_no_token() -> None:
    """Tokens that are the bytes which a span adds do not make the key that the span makes."""
    told = hashlib.blake2b(digest_size=32, person=b"kvferry span 1")
    told.update(eight_bytes(0) + eight_bytes(1) + eight_bytes(1) + b"x")
    pretended = np.frombuffer(told.digest(), dtype="<u4")
    real = page_keys(NAMESPACE, [7], 1, content=[ContentSpan(0, 1, b"x")])
    fake = page_keys(NAMESPACE, np.concatenate([np.array([7], dtype="<u4"), pretended]), 9)
    assert real != fake
    # The message is the one that is meant here: told as such, the key is the real one's.
    start = hashlib.blake2b(
        NAMESPACE.root() + eight_bytes(1), digest_size=32, person=b"kvferry start 1"
    ).digest()
    message = start + (7).to_bytes(4, "little") + told.digest()
    assert [hashlib.blake2b(message, digest_size=32, person=b"kvferry page 1").digest()] == real

"""Page keys: the same everywhere for the same prefix, and never for two that differ."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.index.index_rig import NAMESPACE, eight_bytes

from kvferry.errors import PageKeyError
from kvferry.index import KEY_BYTES, KEY_VERSION, ContentSpan, Namespace, page_keys

_FULL = Namespace(
    model="example/model-8b",
    revision="main@0123",
    dtype="bfloat16",
    geometry="cdd9f9e9d34968ac8af7f1ab47fe42a8",
    lora="väter",
    salt="s",
    shard="tp 1/2",
)
_PICTURES = (ContentSpan(1, 4, b"picture" * 5), ContentSpan(4, 9, b"sound"))

# Of key version 1. Changing one makes every stored page unreachable, and wants a new version.
_GOLDEN_ROOTS = {
    NAMESPACE: "208e3a598f86f276af4431a6b713d1f9f4c7c5a2fbc4104e2c7f86683fbbf4b6",
    _FULL: "91e6a80b07bbf98446124c4ac29b0735c408d42ae3f6e622df6cf332a063d1b0",
}
_GOLDEN: list[tuple[Namespace, list[int], int, Sequence[ContentSpan], list[str]]] = [
    (
        NAMESPACE,
        list(range(192)),
        64,
        (),
        [
            "d424b52eea135d778e9c6747898b8e6071163d471e1b0500371756d637709f92",
            "f8f1b81f5b3acfe553f7a2c593ccdf5920a81f92db6e2fefac8c37fb2822c4fe",
            "6bb036a3112cfaa9de07337c14db332d0531a2966d88291fbf102d3f9b02e740",
        ],
    ),
    (
        _FULL,
        [0, 1, 2**31, 2**32 - 1],
        2,
        (),
        [
            "4c9dff925bc356ed24ef053c672cfdfc5fb19cd8ea79ea16ce0088e9fb1cafa5",
            "2a394801b295e9af3fbeec0255b840cc4d93c2d149da745dda6745358e1f8f45",
        ],
    ),
    (
        NAMESPACE,
        [7] * 6,
        2,
        _PICTURES,
        [
            "322e3a6384767ecfb4ad21ea0502286c29c0d529eff2e952681a127f8d9c2832",
            "fc63770dda57d51a6904d21c2267c7919c5f231f4e1af34cf15759e3eda9e5f8",
            "636f9f22075b85905c5090d1e8d2799e282506c7d8e5c3adf8aa4e15e1aeb5f6",
        ],
    ),
]


def _hex(keys: list[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _as_written_down(namespace: Namespace, tokens: list[int], size: int) -> list[bytes]:
    """Keys by the definition alone, without spans, from the standard library."""

    def hashed(person: str, message: bytes) -> bytes:
        return hashlib.blake2b(message, digest_size=32, person=person.encode()).digest()

    fields = itertools.chain.from_iterable(dataclasses.asdict(namespace).items())
    root = b"".join(eight_bytes(len(text.encode())) + text.encode() for text in fields)
    key = hashed("kvferry start 1", hashed("kvferry root 1", root) + eight_bytes(size))
    keys = []
    for at in range(0, len(tokens) // size * size, size):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + size])
        key = hashed("kvferry page 1", key + page)
        keys.append(key)
    return keys


def test_golden_roots() -> None:
    """The roots of key version 1."""
    assert KEY_VERSION == 1
    assert {space: space.root().hex() for space in _GOLDEN_ROOTS} == _GOLDEN_ROOTS


@pytest.mark.parametrize(("namespace", "tokens", "size", "content", "keys"), _GOLDEN)
def test_golden_keys(
    namespace: Namespace,
    tokens: list[int],
    size: int,
    content: Sequence[ContentSpan],
    keys: list[str],
) -> None:
    """The keys of key version 1, and their width."""
    assert _hex(page_keys(namespace, tokens, size, content=content)) == keys
    assert KEY_BYTES == 32
    assert {len(key) for key in keys} == {2 * KEY_BYTES}


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_keys_are_those_of_the_definition(size: int) -> None:
    """Random prompts against a second implementation that takes no short cut."""
    rng = random.Random(size)
    for namespace in (NAMESPACE, _FULL):
        tokens = [rng.randrange(2**32) for _ in range(rng.randint(0, 5 * size))]
        assert page_keys(namespace, tokens, size) == _as_written_down(namespace, tokens, size)


_CHILD = """
import json, sys
from kvferry.index import ContentSpan, Namespace, page_keys
fields, tokens, size, spans = json.load(sys.stdin)
content = {ContentSpan(first, count, bytes.fromhex(name)) for first, count, name in spans}
keys = page_keys(Namespace(**fields), tokens, size, content=content)
print(json.dumps([key.hex() for key in keys]))
"""


def test_eight_processes_agree() -> None:
    """Fresh interpreters, each with another seed for Python's own hashes, give the same keys."""
    rng = random.Random(8)
    tokens = [rng.randrange(150_000) for _ in range(1000)]
    content = [ContentSpan(rng.randrange(900), rng.randint(1, 99), rng.randbytes(32))
               for _ in range(20)]  # fmt: skip
    spans = [(span.first_token, span.num_tokens, span.content_id.hex()) for span in content]
    told = json.dumps([dataclasses.asdict(_FULL), tokens, 64, spans])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1", "2", "3", "77", "4294967295", "random", "random")
    ]
    try:
        answers = [json.loads(child.communicate(told, timeout=60)[0]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait(60)
    assert answers == [_hex(page_keys(_FULL, tokens, 64, content=content))] * 8


def _strided(ids: Any) -> Any:
    wide = np.zeros((len(ids), 3), dtype=np.int64)
    wide[:, 1] = ids
    return wide[:, 1]


@pytest.mark.parametrize(
    "container",
    [
        tuple,
        lambda ids: np.array(ids, dtype=np.int32),
        lambda ids: np.array(ids, dtype=np.int64),
        lambda ids: np.array(ids, dtype=np.uint32),
        lambda ids: np.array(ids, dtype=np.uint64),
        lambda ids: np.array(ids, dtype=">i4"),
        lambda ids: np.array(ids, dtype=">u4"),
        lambda ids: [np.int64(token) for token in ids],
        lambda ids: np.array(ids, dtype=np.int32)[::-1].copy()[::-1],
        _strided,
        lambda ids: array("i", ids),
        lambda ids: array("Q", ids),
        lambda ids: memoryview(array("I", ids)),
        lambda ids: memoryview(array("q", ids)),
        lambda ids: memoryview(array("I", ids).tobytes()).cast("I"),
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        lambda ids: torch.tensor(ids, dtype=torch.int64),
        lambda ids: torch.tensor(ids, dtype=torch.uint32),
        lambda ids: torch.from_numpy(_strided(ids)),
        lambda ids: list(torch.tensor(ids)),
    ],
)
@pytest.mark.parametrize("num_known", [0, 2])
def test_every_container_gives_the_same_keys(
    container: Callable[[list[int]], Any], num_known: int
) -> None:
    """Lists, tuples, arrays, buffers and tensors of any integer width and byte order."""
    rng = random.Random(1)
    tokens = [rng.randrange(2**31) for _ in range(70)]
    keys = page_keys(NAMESPACE, tokens, 16)
    assert page_keys(NAMESPACE, container(tokens), 16, known=keys[:num_known]) == keys


def test_small_integer_arrays_are_tokens_too() -> None:
    """A byte-level vocabulary in one byte or two a token; a range as well."""
    keys = page_keys(NAMESPACE, list(range(100)), 10)
    for given in (np.arange(100, dtype=np.uint8), np.arange(100, dtype=np.int16), range(100)):
        assert page_keys(NAMESPACE, given, 10) == keys


def test_known_keys_are_gone_on_from() -> None:
    """A prompt that grows gets the keys of the whole, from its new tokens alone."""
    tokens = list(range(1000))
    content = [ContentSpan(10, 300, b"a picture"), ContentSpan(700, 5, b"a sound")]
    whole = page_keys(NAMESPACE, tokens, 64, content=content)
    for known in range(len(whole) + 1):
        # None of the first tokens is looked at.
        given: list[Any] = [None] * (known * 64) + tokens[known * 64 :]
        assert page_keys(NAMESPACE, given, 64, content=content, known=whole[:known]) == whole
    assert page_keys(NAMESPACE, tokens[:200], 64, content=content, known=whole) == whole[:3]


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128])
def test_only_whole_pages_have_keys(size: int, count: int) -> None:
    """The number of keys is rounded down, and tokens behind the last whole page do not matter."""
    tokens = list(range(count))
    keys = page_keys(NAMESPACE, tokens, size)
    assert len(keys) == count // size
    assert keys == page_keys(NAMESPACE, list(range(128)), size)[: count // size]
    assert keys == page_keys(NAMESPACE, np.array(tokens, dtype=np.uint32), size)


@pytest.mark.parametrize("at", [0, 62, 63, 64, 65, 127, 128, 191])
def test_prompts_that_part(at: int) -> None:
    """Keys are equal up to the page with the first other token, and differ from there on."""
    one = list(range(192))
    other = [*one[:at], 5_000, *one[at + 1 :]]
    for size in (64, 1):
        pairs = list(
            zip(page_keys(NAMESPACE, one, size), page_keys(NAMESPACE, other, size), strict=True)
        )
        first = at // size
        assert all(left == right for left, right in pairs[:first])
        assert all(left != right for left, right in pairs[first:])


def test_a_part_of_a_prompt_is_another_prompt() -> None:
    """The keys of A+B+C and those of C alone have nothing in common, nor have A+A and A."""
    a, b, c = (list(range(start, start + 64)) for start in (0, 100, 200))
    whole = page_keys(NAMESPACE, a + b + c, 64)
    assert not set(whole) & set(page_keys(NAMESPACE, c, 64))
    assert not set(whole) & set(page_keys(NAMESPACE, b + c, 64))
    assert len(set(page_keys(NAMESPACE, a + a + a, 64))) == 3


def test_where_one_token_ends() -> None:
    """Ids that would be the same digits, or the same bytes, side by side."""
    prompts = [[1, 23], [12, 3], [123, 0], [0, 123], [1, 2], [2, 1], [258, 0], [2, 256], [0, 0]]
    keys = [page_keys(NAMESPACE, prompt, 2)[0] for prompt in prompts]
    assert len(set(keys)) == len(prompts)


def test_pages_of_different_size_share_no_key() -> None:
    """Also where the geometry is not told apart: the size of a page is in the start."""
    tokens = [0] * 64
    keys = [key for size in (1, 2, 4, 8, 64) for key in page_keys(NAMESPACE, tokens, size)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("num_known", [0, 1])
@pytest.mark.parametrize("bad", [-1, 2**32, 1 << 80, 1.0, "7", None, b"x"])
def test_a_bad_token_is_named(bad: Any, num_known: int) -> None:
    """With its value and its place in the prompt, in a list or an array."""
    known = page_keys(NAMESPACE, [1, 2], 2)[:num_known]
    tokens = [1, 2, 3, 4, 5, bad, 7, 8]
    with pytest.raises(PageKeyError, match=r"token 5 is (-1|\d{10,}|1\.0|'7'|None|b'x');"):
        page_keys(NAMESPACE, tokens, 2, known=known)
    if bad in (-1, 2**32):
        with pytest.raises(PageKeyError, match=rf"token 5 is {bad};"):
            page_keys(NAMESPACE, np.array(tokens, dtype=np.int64), 2, known=known)
        with pytest.raises(PageKeyError, match=rf"token 5 is {bad};"):
            page_keys(NAMESPACE, torch.tensor(tokens), 2, known=known)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (b"abcdefgh", "memoryview"),
        (bytearray(8), "memoryview"),
        ("12345678", "str"),
        (np.zeros(8), "float64"),
        (np.zeros(8, dtype=bool), "bool"),
        (np.zeros((2, 8), dtype=np.int32), r"\[2, 8\]"),
        (np.int64(7), r"\[\]"),
        (np.ma.masked_array([1, 2, 3, 4]), "masked"),
        (torch.zeros(8), "float32"),
        (torch.zeros(8, dtype=torch.int32, device="meta"), r"tokens\.cpu\(\)"),
        (array("d", [1.0] * 8), "float64"),
        (None, "whole numbers|shape"),
        ([[1, 2], [3, 4]], "token 0"),
    ],
)
def test_what_is_no_prompt_is_refused(tokens: Any, says: str) -> None:
    """Text, floats, several prompts at once, and memory that is not here."""
    with pytest.raises(PageKeyError, match=says):
        page_keys(NAMESPACE, tokens, 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora": None}, "lora is None.*empty where there is none"),
        ({"salt": 7}, "salt is 7"),
        ({"model": ""}, "model is empty"),
        ({"revision": ""}, "revision is empty"),
        ({"dtype": ""}, "dtype is empty"),
        ({"geometry": ""}, "geometry is empty"),
        ({"shard": b"x"}, "shard is b'x'"),
        ({"salt": "\ud800"}, "UTF-8"),
    ],
)
def test_a_namespace_that_says_too_little_is_refused(changes: Any, says: str) -> None:
    """A None, an empty model, or what cannot be written down."""
    with pytest.raises(PageKeyError, match=says):
        dataclasses.replace(NAMESPACE, **changes)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 1.5}, r"page_size is 1\.5"),
        ({"known": [b"short"]}, "known key 0"),
        ({"known": ["x" * 32]}, "known key 0"),
        ({"content": [ContentSpan(-1, 1, b"x")]}, "first_token of span 0 is -1"),
        ({"content": [ContentSpan(0, 0, b"x")]}, "num_tokens of span 0 is 0"),
        ({"content": [ContentSpan(0, 1, b"")]}, "content_id of span 0"),
        ({"content": [ContentSpan(0, 1, b"x"), (0, 1, "x")]}, "content_id of span 1"),
        ({"content": [(0, 1)]}, "span 0 is"),
        ({"content": [7]}, "span 0 is 7"),
    ],
)
def test_bad_arguments_are_named(given: Any, says: str) -> None:
    """Each with its value."""
    with pytest.raises(PageKeyError, match=says):
        page_keys(NAMESPACE, [1, 2, 3, 4], **{"page_size": 2, **given})

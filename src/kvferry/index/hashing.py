"""Page keys: what the bytes of a page were computed from, in 32 bytes.

    start = H(namespace, page size)
    key i = H(key i-1 or start, tokens of page i, content that touches page i)

H is BLAKE2b with 256 bits. A key covers everything before its page too, so equal keys mean equal
prefixes in one namespace, on every machine and in every process. Changing anything here makes all
stored pages unreachable: then, and only then, `KEY_VERSION` goes up.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

from kvferry.errors import PageKeyError
from kvferry.index.token_bytes import TOKEN_BYTES, tokens_behind

__all__ = ["KEY_BYTES", "KEY_VERSION", "ContentSpan", "Namespace", "page_keys"]

KEY_BYTES = 32
KEY_VERSION = 1

_MAX_PAGE_SIZE = 1 << 30
_MAX_TOKENS = 1 << 62
# Each kind of message has a person of its own, so that none can be taken for one of another kind.
_PERSON = {what: f"kvferry {what} {KEY_VERSION}".encode() for what in ("root", "start", "page")}
_PERSON["content"] = f"kvferry span {KEY_VERSION}".encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything beside the tokens that makes KV differ. Keys of two namespaces are never equal.

    Raises PageKeyError for a field that is no text, or an empty one where there is no default.
    """

    model: str
    """Which weights: a name that nobody else uses for others."""

    revision: str
    """Which state of these weights: a commit, a checksum, a date of training."""

    dtype: str
    """What the elements are. Two types of one size look the same to everything but the model."""

    geometry: str
    """`Geometry.fingerprint`: page size, planes, layers and the order of bytes in a page."""

    lora: str = ""
    """The adapter on the weights."""

    salt: str = ""
    """What keeps users apart who must not see whether others had the same prompt."""

    shard: str = ""
    """Which part of the planes this rank has; empty where all ranks have the same bytes."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # A None would be hashed by its address in other schemes, and as "None" in the worst.
            if not isinstance(value, str):
                raise PageKeyError(
                    f"namespace field {field.name} is {value!r}; it must be text"
                    f"{', and is empty where there is none' if field.default == '' else ''}"
                )
            if not value and field.default != "":
                raise PageKeyError(
                    f"namespace field {field.name} is empty, and pages of different models would "
                    f"share keys; name what the KV was computed with"
                )
            try:
                value.encode()
            except UnicodeEncodeError as bad:
                raise PageKeyError(
                    f"namespace field {field.name} is {value!r}, which UTF-8 cannot tell: {bad}"
                ) from bad

    def root(self) -> bytes:
        """32 bytes that differ wherever two namespaces differ in any field."""
        return self._root

    @functools.cached_property
    def _root(self) -> bytes:
        told = _hash("root")
        for field in dataclasses.fields(self):
            _add_framed(told, field.name.encode())
            _add_framed(told, getattr(self, field.name).encode())
        return _digest(told)


class ContentSpan(NamedTuple):
    """Tokens that stand for an image, a sound or the like, which they do not tell themselves."""

    first_token: int
    """Where it begins in the prompt."""

    num_tokens: int
    content_id: bytes
    """A full-width hash of the content: 16 bytes or more if strangers may choose the content."""


def page_keys(
    namespace: Namespace,
    tokens: Any,
    page_size: int,
    *,
    content: Iterable[ContentSpan] = (),
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """The key of each whole page of a prompt, first page first.

    Args:
        namespace: What the KV is computed with.
        tokens: Shape ``[tokens]``, from the first token of the prompt on: a list or other sequence
            of ints, or an integer array, buffer or tensor in host memory. All of them give the same
            keys; contiguous uint32 is fastest. Ids lie between 0 and 2³² - 1.
        page_size: In tokens. Tokens behind the last whole page do not matter.
        content: Spans of the prompt that stand for something else, in any order. A span may begin
            or end behind the last token, as when a prompt is hashed piece by piece.
        known: Keys of leading pages, from an earlier call for the same prompt. Their tokens are
            not looked at again.

    Raises:
        PageKeyError: Tokens, a span, the page size or a known key that is none. A bad token is
            named with its position.
    """
    size = _whole("page_size", page_size, 1, _MAX_PAGE_SIZE)
    num_tokens, behind = tokens_behind(tokens, len(known) * size, size)
    keys = list(known[: num_tokens // size])
    for at, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise PageKeyError(f"known key {at} is {key!r}; a page key is {KEY_BYTES} bytes")
    extras = _content_of_pages(content, size, len(keys), num_tokens // size)
    key = keys[-1] if keys else _start(namespace, size)
    page_bytes = size * TOKEN_BYTES
    # Copying a prepared state is a third faster than making one, and a prompt has many pages.
    prepared = _hash("page").copy
    first_page = len(keys)
    for page, at in enumerate(range(0, len(behind), page_bytes), first_page):
        told = prepared()
        told.update(key)
        told.update(behind[at : at + page_bytes])
        # All pages of a chain have one size, so a message with content is longer than any without.
        if page in extras:
            told.update(extras[page])
        key = told.digest()
        keys.append(key)
    return keys


def _start(namespace: Namespace, page_size: int) -> bytes:
    told = _hash("start")
    told.update(namespace.root())
    told.update(page_size.to_bytes(8, "little"))
    return _digest(told)


def _content_of_pages(
    content: Iterable[ContentSpan], page_size: int, first_page: int, end_page: int
) -> dict[int, bytes]:
    """For each page from `first_page` to `end_page` that a span touches: a hash of its spans."""
    hashes: dict[int, Any] = {}
    for span in sorted(_checked_spans(content)):
        first, end = span.first_token, span.first_token + span.num_tokens
        touched = range(
            max(first // page_size, first_page), min((end - 1) // page_size + 1, end_page)
        )
        for page in touched:
            if page not in hashes:
                hashes[page] = _hash("content")
            told = hashes[page]
            # Where the page lies in the span, and the span's whole length.
            told.update((first - page * page_size).to_bytes(8, "little", signed=True))
            told.update(span.num_tokens.to_bytes(8, "little"))
            _add_framed(told, span.content_id)
    return {page: told.digest() for page, told in hashes.items()}


def _checked_spans(content: Iterable[ContentSpan]) -> Iterator[ContentSpan]:
    for number, span in enumerate(content):
        try:
            first_token, num_tokens, content_id = span
        except (TypeError, ValueError) as bad:
            raise PageKeyError(f"content span {number} is {span!r}; pass a ContentSpan") from bad
        if not isinstance(content_id, bytes) or not content_id:
            raise PageKeyError(
                f"content_id of span {number} is {content_id!r}; it must be bytes, and not empty: "
                f"a hash of the content, in full width"
            )
        yield ContentSpan(
            _whole(f"first_token of span {number}", first_token, 0, _MAX_TOKENS),
            _whole(f"num_tokens of span {number}", num_tokens, 1, _MAX_TOKENS),
            content_id,
        )


def _hash(what: str) -> Any:
    return hashlib.blake2b(digest_size=KEY_BYTES, person=_PERSON[what])


def _digest(told: Any) -> bytes:
    key: bytes = told.digest()
    return key


def _add_framed(told: Any, value: bytes) -> None:
    """The length first, so that no two lists of values are one message."""
    told.update(len(value).to_bytes(8, "little"))
    told.update(value)


def _whole(what: str, value: SupportsIndex, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError as bad:
        raise PageKeyError(f"{what} is {value!r}; it must be a whole number") from bad
    if not low <= number <= high:
        raise PageKeyError(f"{what} is {number}; it must lie between {low} and {high}")
    return number

"""Replays of traces: ratios against plain references, limits, policies, and bad traces."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from kvferry.cli.main import main
from kvferry.errors import ConfigError, TraceError
from kvferry.replay import Replay, ReplayResult, TracedRequest, read_trace, text_plot, write_plot


def _requests(*ids: tuple[int, ...]) -> list[TracedRequest]:
    return [TracedRequest(0, 512 * len(one), 1, one) for one in ids]


def _replay(requests: list[TracedRequest], **given: Any) -> ReplayResult:
    options = {"page_size": 512, "page_bytes": 10, "host_pages": None, "storage_pages": None}
    return Replay(**(options | given)).run(requests)


def _random_trace(seed: int, length: int = 300) -> list[TracedRequest]:
    """Prompts that grow out of one another, as in conversations."""
    rng = random.Random(seed)
    prompts: list[tuple[int, ...]] = [()]
    new = iter(range(10**6))
    for _ in range(length):
        base = rng.choice(prompts[-20:])
        kept = base[: rng.randint(0, len(base))]
        prompts.append((*kept, *(next(new) for _ in range(rng.randint(0, 6)))))
    return _requests(*prompts[1:])


def _infinite(requests: list[TracedRequest]) -> float:
    """What is asked of the ratio, in ten lines."""
    seen: set[int] = set()
    found = total = 0
    for request in requests:
        for one in request.hash_ids:
            if one not in seen:
                break
            found += 1
        seen.update(request.hash_ids)
        total += len(request.hash_ids)
    return found / total


@pytest.mark.parametrize("page_size", [512, 64])
@pytest.mark.parametrize("seed", range(3))
def test_a_cache_without_limits_finds_what_can_be_found(seed: int, page_size: int) -> None:
    """And so does one for which that is only worked out beside, whatever its limits are."""
    trace = _random_trace(seed)
    wanted = _infinite(trace)
    assert 0.1 < wanted < 0.9
    free = _replay(trace, page_size=page_size)
    assert free.hit_ratio == free.hit_ratio_infinite == pytest.approx(wanted, abs=0)
    assert free.storage.hit_pages == free.host.evicted_pages == 0
    tight = _replay(trace, page_size=page_size, host_pages=40, storage_pages=60)
    assert tight.hit_ratio_infinite == wanted
    assert tight.hit_ratio < wanted


@pytest.mark.parametrize("store", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("eviction", ["lru", "lfu", "slru", "fifo", "mru", "priority"])
def test_limits_hold_and_counts_add_up(eviction: str, store: str) -> None:
    """Under every policy; pages are where they came to, less those that left."""
    trace = _random_trace(7)
    told = _replay(trace, host_pages=25, storage_pages=50, eviction=eviction, store=store)
    for tier, most in ((told.host, 25), (told.storage, 50)):
        assert tier.used_pages == tier.stored_pages - tier.evicted_pages <= most
        assert tier.used_pages > most // 2
    assert told.pages == sum(len(one.hash_ids) for one in trace)
    assert 0 < told.hit_ratio <= told.hit_ratio_infinite
    assert sum(share.host for share in told.shares) == told.host.hit_pages
    assert sum(share.storage for share in told.shares) == told.storage.hit_pages
    assert sum(share.requests for share in told.shares) == told.requests == len(trace)


def test_the_page_used_longest_ago_leaves_and_storage_has_it() -> None:
    """Worked out by hand: two pages on the host, three in storage."""
    told = _replay(
        _requests((1,), (2,), (3,), (1,), (2,), (4,), (5,), (3,)), host_pages=2, storage_pages=3
    )
    # 1 and 2 come back from storage, which then has 3, 1, 2, oldest first; 4 drops 3, 5 drops 1,
    # and the last 3, which nobody has, drops 2.
    assert (told.host.hit_pages, told.storage.hit_pages) == (0, 2)
    assert (told.storage.stored_pages, told.storage.evicted_pages) == (6, 3)
    assert told.prefetched_pages == 2


def test_a_page_leaves_only_after_those_behind_it() -> None:
    """However long ago the root was used, a hit needs it."""
    told = _replay(_requests((1, 2), (3,), (1, 2)), host_pages=2, storage_pages=0)
    assert told.host.hit_pages == 1  # 2 left for 3, and 1 stayed


def test_selective_keeps_what_is_asked_for_twice() -> None:
    """The third request finds what the second brought to the host."""
    trace = _requests((1, 2), (1, 2), (1, 2))
    assert _replay(trace, store="write_through_selective").host.hit_pages == 2
    assert _replay(trace, store="write_through").host.hit_pages == 4


class _PlainCache:
    """Host and storage as lists, the page used longest ago first, and counts of all offers."""

    def __init__(self, host: int, storage: int, hits: int) -> None:
        self.most = host, storage
        self.host: list[int] = []
        self.storage: list[int] = []
        self.needed = hits
        self.offers: dict[int, int] = {}
        self.found = [0, 0]

    def serve(self, prompt: tuple[int, ...]) -> None:
        """One request whose prompt has no page before or behind it in any other."""
        (page,) = prompt
        has_it = page in self.host, page in self.storage
        self.found[0] += has_it[0]
        self.found[1] += has_it[1] and not has_it[0]
        self.offers[page] = self.offers.get(page, 0) + 1
        if has_it[1]:
            self.storage.remove(page)
            self.storage.append(page)
        if any(has_it) or self.offers[page] >= self.needed:
            for tier, is_there, most in zip(
                (self.host, self.storage), has_it, self.most, strict=True
            ):
                if tier is self.host and is_there:
                    tier.remove(page)
                if tier is self.host or not is_there:
                    tier.append(page)
                del tier[: max(0, len(tier) - most)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("store", "hits"),
    [("write_through", 1), ("write_back", 1), *(("write_through_selective", n) for n in (1, 2, 4))],
)
def test_policies_against_plain_lists(store: str, hits: int, seed: int) -> None:
    """When pages go to the host; and storage has them at once, whatever the policy."""
    rng = random.Random(seed)
    prompts = [(min(int(rng.paretovariate(0.6)), 200),) for _ in range(600)]
    plain = _PlainCache(10, 30, hits)
    for prompt in prompts:
        plain.serve(prompt)
    given = {"selective_hits": hits} if store == "write_through_selective" else {}
    told = _replay(_requests(*prompts), host_pages=10, storage_pages=30, store=store, **given)
    assert [told.host.hit_pages, told.storage.hit_pages] == plain.found
    assert min(plain.found) > 10
    assert (told.host.used_pages, told.storage.used_pages) == (10, len(plain.storage))


def test_write_back_is_storing_at_the_end_of_a_request() -> None:
    """There is no engine's memory here that would keep pages any longer."""
    trace = _random_trace(5)
    one, other = (
        _replay(trace, host_pages=25, storage_pages=50, store=store).to_dict()
        for store in ("write_back", "write_through")
    )
    assert {**one, "seconds": 0, "policies": 0} == {**other, "seconds": 0, "policies": 0}
    told = _replay(_requests((1,), (2,), (3,)), host_pages=2, store="write_back")
    assert (told.storage.stored_pages, told.host.evicted_pages) == (3, 1)


def test_hits_are_counted_as_the_cache_does() -> None:
    """By the prompt: a page counts only where all before it have come as often."""
    trace = _requests((1, 2), (1, 3), (1, 3))
    told = _replay(trace, store="write_through_selective")
    assert (told.host.hit_pages, told.host.stored_pages) == (1, 2)
    often = _replay(trace, store="write_through_selective", selective_hits=3)
    assert (often.host.hit_pages, often.host.stored_pages) == (0, 1)


def test_a_prompt_larger_than_the_host_keeps_its_beginning() -> None:
    """What does not fit is counted."""
    told = _replay(_requests((1, 2, 3, 4), (1, 2, 3, 4)), host_pages=3, storage_pages=0)
    assert told.host.hit_pages == 3
    assert told.host.refused_pages == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"page_size": 100}, "page_size=100 does not divide the 512 tokens"),
        ({"page_size": 0}, "page_size=0"),
        ({"store": "sometimes"}, "store='sometimes' is none of write_through"),
        ({"host_pages": -1}, "host_pages=-1"),
        ({"selective_hits": 0}, "selective_hits=0"),
    ],
)
def test_what_cannot_be_replayed_is_refused(given: dict[str, Any], message: str) -> None:
    """With the value and what would do."""
    with pytest.raises(ConfigError, match=message):
        _replay([], **given)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("[1]", "line 2 is no JSON object"),
        ('{"hash_ids": "1"}', "line 2: hash_ids must be a list"),
        ('{"hash_ids": [-1]}', "line 2: hash_ids must be a list of whole numbers"),
        ('{"hash_ids": [true]}', "line 2: hash_ids must be"),
        ("{}", "line 2: hash_ids must be"),
        ('{"hash_ids": [4, 5, 4]}', "line 2: hash_ids has 4 twice"),
        ('{"hash_ids": [], "input_length": -1}', "line 2: input_length must be"),
        ('{"hash_ids": [], "timestamp": "now"}', "line 2: timestamp must be"),
        ('{"hash_ids": [], "timestamp": NaN}', "line 2: timestamp must be"),
        ('{"hash_ids": [], "timestamp": 1e400}', "line 2: timestamp must be"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, message: str) -> None:
    """By the file and its number."""
    file = tmp_path / "trace.jsonl"
    file.write_text('{"hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(TraceError, match=message):
        list(read_trace(file))


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    """Or is no text."""
    with pytest.raises(TraceError, match=r"none\.jsonl: No such file"):
        list(read_trace(tmp_path / "none.jsonl"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="cannot read the trace"):
        list(read_trace(tmp_path / "bytes"))


def test_an_id_that_stands_for_two_prompts() -> None:
    """Names the request."""
    with pytest.raises(TraceError, match="request 2 of the trace"):
        _replay(_requests((1, 2), (3, 2)))


def _written(tmp_path: Path, trace: list[TracedRequest]) -> tuple[str, str]:
    file, geometry = tmp_path / "trace.jsonl", tmp_path / "geometry.json"
    lines = [json.dumps(one._asdict()) for one in trace]
    file.write_text("\n".join([*lines, "", ""]))
    plane = {"name": "kv", "num_layers": 2, "element_size": 4}
    geometry.write_text(json.dumps({"planes": [plane]}))
    return str(file), str(geometry)


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has what the library says; sizes become pages of the geometry."""
    trace = _random_trace(3)
    file, geometry = _written(tmp_path, trace)
    picture = tmp_path / "hits.svg"
    command = ["replay", file, "--geometry", geometry, "--host-bytes", "160KiB"]
    options = ["--storage-bytes", "400kB", "--policy", "lfu", "--policy", "write_back"]
    assert main([*command, *options, "--json", "--plot", str(picture)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["page_bytes"] == 4096
    result = _replay(
        trace, page_bytes=4096, host_pages=40, storage_pages=97, eviction="lfu", store="write_back"
    )
    assert {**told, "seconds": 0} == {**json.loads(json.dumps(result.to_dict())), "seconds": 0}
    assert told["hit_ratio_infinite"] == _infinite(trace)
    assert told["requests"] == len(trace)
    assert {"host", "storage"} == set(told["tiers"])
    assert ET.parse(picture).getroot().tag.endswith("svg")  # noqa: S314  we wrote it

    selective = [*command, "--policy", "write_through_selective", "--json"]
    stored = []
    for given, variable in (([], None), ([], "4"), (["--selective-hits", "3"], "4")):
        if variable is not None:
            monkeypatch.setenv("KVFERRY_STORE_SELECTIVE_HITS", variable)
        assert main([*selective, *given]) == 0
        stored.append(json.loads(capsys.readouterr().out)["tiers"]["host"]["stored_pages"])
    wanted = [
        _replay(
            trace, page_bytes=4096, host_pages=40, store="write_through_selective",
            selective_hits=hits,
        ).host.stored_pages
        for hits in (2, 4, 3)
    ]  # fmt: skip
    assert stored == wanted
    assert len(set(wanted)) == 3
    assert main([*command, "--page-size", "64"]) == 0
    out = capsys.readouterr().out
    assert f"requests   {len(trace)}, " in out
    assert "pages of 64 tokens" in out
    assert "host, + storage" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host-bytes", "5"], "--host-bytes 5 holds no page"),
        (["--host-bytes", "0"], "--host-bytes 0 holds no page"),
        (["--storage-bytes", "5"], "--storage-bytes 5 holds no page"),
        (["--host-bytes", "much"], "--host-bytes 'much' must be"),
        (["--policy", "best"], "--policy 'best' is none of lru"),
        (["--policy", "lru", "--policy", "fifo"], "the eviction policy was given already"),
        (["--page-size", "96"], "page_size=96 does not divide"),
        (["--selective-hits", "0"], "store.selective_hits"),
    ],
)
def test_bad_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """Are one line, and status 2."""
    file, geometry = _written(tmp_path, _random_trace(1, 3))
    assert main(["replay", file, "--geometry", geometry, *options]) == 2
    assert message in capsys.readouterr().err


def test_pictures_of_nothing_and_of_much(tmp_path: Path) -> None:
    """An empty trace has a picture; bars are no longer than what could be found."""
    for trace in ([], _random_trace(2)):
        told = _replay(trace, host_pages=10, storage_pages=30)
        write_plot(told, tmp_path / "plot.svg")
        ET.parse(tmp_path / "plot.svg")  # noqa: S314  we wrote it
        bars = text_plot(told)[1:]
        assert len(bars) == (10 if trace else 0)
        assert all(line.count("#") + line.count("+") + line.count(".") <= 60 for line in bars)

"""The toy engine: what it emits does not depend on the cache, and what it computes does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import engine as toy
from engine import PAGE, Engine, Model, Request, Shape, open_cache
from kvferry import KVFerry
from kvferry.testing import flip_host_bit

_TEXT = [number * 37 % 211 for number in range(3 * PAGE + 20)]
_QUESTIONS = [
    [*_TEXT[: PAGE * pages + 9], 7, 100 + number] for number, pages in enumerate((3, 2, 1, 3, 0))
]
_MAX_NEW = 9


@pytest.fixture(scope="module")
def model() -> Model:
    """One for all tests: nothing changes it."""
    return Model(Shape())


@pytest.fixture
def make(model: Model) -> Iterator[Callable[..., Engine]]:
    """Engines whose caches are closed at the end, and have all of their blocks then."""
    with ExitStack() as stack:

        def made(*, num_blocks: int = 128, cached: bool = True, **sections: Any) -> Engine:
            pool = model.new_pool(num_blocks)
            if not cached:
                return Engine(model, pool)
            given = {"host": {"num_bytes": "4MiB"}, **sections}
            return Engine(model, pool, stack.enter_context(open_cache(pool, **given)))

        yield made


def _ask(engine: Engine, prompts: list[list[int]], max_new: int = _MAX_NEW) -> list[Request]:
    asked = [engine.submit(prompt, max_new) for prompt in prompts]
    engine.run()
    assert sorted(engine.free) == list(range(engine.pool.shape[1] // toy.BLOCK))
    return asked


def _outputs(requests: list[Request]) -> list[list[int]]:
    return [one.output for one in requests]


def _hits(requests: list[Request]) -> list[int]:
    return [one.hits for one in requests]


def _cache(engine: Engine) -> KVFerry:
    assert engine.cache is not None
    return engine.cache


def _flip(engine: Engine, page: int) -> None:
    """Change page `page` of the first question on the host, in the exponents of many numbers."""
    key = _cache(engine).keys(_QUESTIONS[0])[page]
    for byte in range(3, 4096, 4):
        flip_host_bit(_cache(engine), key, byte=byte)


def test_outputs_are_the_same_with_and_without_a_cache(make: Callable[..., Engine]) -> None:
    """First all is computed and stored; the second time whole pages are loaded, and counted."""
    expected = _outputs(_ask(make(cached=False), _QUESTIONS))
    assert len({tuple(output) for output in expected}) == len(_QUESTIONS)
    engine = make()
    first = _ask(engine, _QUESTIONS[:1])
    assert (_hits(first), _outputs(first)) == ([0], expected[:1])
    # Of the others, which never came before, what they have in common with it is there.
    second = _ask(engine, _QUESTIONS[1:])
    assert _hits(second) == [2 * PAGE, PAGE, 3 * PAGE, 0]
    assert _outputs(second) == expected[1:]
    third = _ask(engine, _QUESTIONS)
    assert _hits(third) == [3 * PAGE, 2 * PAGE, PAGE, 3 * PAGE, 0]
    assert _outputs(third) == expected


def test_kv_is_the_same_byte_for_byte(make: Callable[..., Engine]) -> None:
    """A prompt that is loaded leaves in the pool what one that is computed leaves there."""
    found, hits = [], 0
    for cached in (False, True):
        engine = make(cached=cached)
        if cached:
            _ask(engine, _QUESTIONS[:1])
            engine.pool.fill_(float("nan"))  # what is not loaded must be computed
        request = engine.submit(_QUESTIONS[0], 2)
        engine.step()
        found.append(engine.pool[:, request.slots(len(request.prompt))])
        engine.run()
        hits = request.hits
    assert hits == 3 * PAGE
    assert torch.equal(found[0], found[1])


def test_answers_are_kept_too(make: Callable[..., Engine]) -> None:
    """What was generated is offered when a request leaves: a follow-up finds it."""
    engine = make()
    (answer,) = _ask(engine, _QUESTIONS[:1], max_new=PAGE)
    follow_up = [*_QUESTIONS[0], *answer.output, 5]
    (found,) = _ask(engine, [follow_up])
    assert found.hits == 4 * PAGE
    assert _outputs([found]) == _outputs(_ask(make(cached=False), [follow_up]))


def test_a_prompt_is_found_while_its_first_request_still_runs(make: Callable[..., Engine]) -> None:
    """It is stored when it is computed, and not when its request leaves."""
    engine = make()
    first = engine.submit(_QUESTIONS[0], PAGE)
    engine.step()
    second = engine.submit(_QUESTIONS[0], _MAX_NEW)
    engine.step()
    assert first in engine.running
    assert second.hits == 3 * PAGE
    engine.run()
    assert second.output == first.output[:_MAX_NEW]


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_bad_page_costs_hits_and_changes_no_output(
    make: Callable[..., Engine], page: int
) -> None:
    """It is computed again from there, by everybody who runs beside, and is back afterwards."""
    engine = make()
    expected = _outputs(_ask(engine, _QUESTIONS))
    _flip(engine, page)
    bad = _ask(engine, _QUESTIONS)
    most = page * PAGE
    assert _hits(bad)[0] == most
    assert _outputs(bad) == expected
    again = _ask(engine, _QUESTIONS)
    assert _hits(again) == [3 * PAGE, 2 * PAGE, PAGE, 3 * PAGE, 0]
    assert _outputs(again) == expected


def test_without_verification_a_bad_page_is_emitted(make: Callable[..., Engine]) -> None:
    """The control: the damage is one that outputs depend on, and nothing else stops it."""
    engine = make(integrity={"verify": "off"})
    expected = _outputs(_ask(engine, _QUESTIONS[:1]))
    _flip(engine, 1)
    bad = _ask(engine, _QUESTIONS[:1])
    assert _hits(bad) == [3 * PAGE]
    assert _outputs(bad) != expected


def test_layers_are_waited_for_before_they_are_read(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer once, in order; the load is over before a token is emitted."""
    engine = make()
    _ask(engine, _QUESTIONS[:1])
    told: list[Any] = []
    load = _cache(engine).load

    def watched(*args: Any, **given: Any) -> Any:
        handle = load(*args, **given)
        wait_layer, wait = handle.wait_layer, handle.wait

        def watched_layer(layer: int) -> None:
            told.append(layer)
            wait_layer(layer)

        def watched_wait() -> None:
            told.append(("verified", *request.output))
            wait()

        monkeypatch.setattr(handle, "wait_layer", watched_layer)
        monkeypatch.setattr(handle, "wait", watched_wait)
        return handle

    monkeypatch.setattr(_cache(engine), "load", watched)
    request = engine.submit(_QUESTIONS[0], 2)
    engine.run()
    assert request.hits == 3 * PAGE
    assert told == [0, 1, 2, ("verified",)]


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_tiny_pools(make: Callable[..., Engine], policy: str) -> None:
    """One request at a time on the device, and three pages on the host: slower, and the same."""
    expected = _outputs(_ask(make(cached=False), _QUESTIONS))
    plain = _ask(make(cached=False, num_blocks=15), _QUESTIONS)
    assert _outputs(plain) == expected
    num_bytes = 4 * 3 * PAGE * 256
    engine = make(num_blocks=15, host={"num_bytes": num_bytes}, store={"policy": policy})
    hits = 0
    for _ in range(3):
        asked = _ask(engine, _QUESTIONS)
        assert _outputs(asked) == expected
        hits += sum(_hits(asked))
    assert hits > 0
    _cache(engine).check_integrity()


def test_a_prompt_that_never_fits_is_refused(make: Callable[..., Engine]) -> None:
    """At once, instead of waiting for blocks that there are not."""
    with pytest.raises(ValueError, match="16 slots"):
        make(num_blocks=1, cached=False).submit([1] * 16, 1)


def test_blocks_stay_with_a_store_that_reads_them(make: Callable[..., Engine]) -> None:
    """A request that is finished gives its blocks back once its stores are over."""
    engine = make()
    request = engine.submit(_QUESTIONS[0], 1)
    engine.step()
    (left,) = engine.leaving
    left.stores[0] = store = SimpleNamespace(done=False)
    engine.step()
    assert left is request
    assert not set(request.blocks) & set(engine.free)
    store.done = True
    engine.run()
    assert set(request.blocks) <= set(engine.free)


def test_storage_is_waited_for(make: Callable[..., Engine]) -> None:
    """What is in storage alone is prefetched while a request waits for its turn."""
    engine = make(prefetch={"policy": "wait_complete", "threshold_tokens": PAGE})
    cache = _cache(engine)
    cache.attach_storage("memory")
    expected = _outputs(_ask(engine, _QUESTIONS))
    assert cache.flush().complete
    cache.reset()
    found = _ask(engine, _QUESTIONS[:1])
    assert (_hits(found), _outputs(found)) == ([3 * PAGE], expected[:1])


def test_the_guide_quotes_the_engine_as_it_is() -> None:
    """Every excerpt of its section is in the file, line for line."""
    guide = (Path(__file__).parents[2] / "docs" / "cache.md").read_text()
    section = guide.split("## A whole engine\n")[1].split("\n## ")[0]
    excerpts = section.split("```text\n")[1:]
    assert len(excerpts) == 4
    lines = [line.strip() for line in Path(toy.__file__).read_text().splitlines()]
    for excerpt in excerpts:
        quoted = [line.strip() for line in excerpt.split("\n```")[0].splitlines()]
        assert any(lines[start : start + len(quoted)] == quoted for start in range(len(lines))), (
            excerpt
        )


def test_the_example_stays_short() -> None:
    """An engine writer reads it in one go: 250 lines at most."""
    assert len(Path(toy.__file__).read_text().splitlines()) <= 250


def test_an_engine_with_nothing_left_waits_for_nothing(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step only frees blocks; waiting there would cost an idle cache a percent."""
    engine = make()
    _cache(engine).switches.flip(store=False)
    waits = list[float]()
    monkeypatch.setattr(type(_cache(engine)), "wait", lambda _, secs: waits.append(secs))
    _ask(engine, _QUESTIONS)
    assert not waits

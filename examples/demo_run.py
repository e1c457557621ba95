"""What the demo does, step by step, and the table it ends with."""

from __future__ import annotations

import copy
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import toy_mla
from demo_models import Answer, Subject, load_smollm2, random_model
from kvferry.adapters.transformers import Moved, PrefixCarrier, StoredPrefix
from kvferry.testing import first_difference

_ROOT = Path(__file__).parents[1]
_TEXTS = ("docs/glossary.md", "LICENSE")
_QUESTIONS = (
    "What is a page?",
    "What does the word slot mean?",
    "What is a digest?",
)
_MAX_STEPS = 16
_TIMED = 3
_PAGE_SIZE = 64
_NARROWEST = 100
_LONGEST_ANSWER = 50


class Comparison(NamedTuple):
    """One question, answered three ways."""

    question: str
    answer: str
    steps: int
    one_shot_secs: float
    """To the first token, everything computed from scratch; the median of a few times."""

    restored_secs: float
    """To the first token, the load of the prefix included; the median of a few times."""

    load: Moved
    verified_pages: int
    delta: float
    """The largest difference of a logit to one-shot prefill: a split may round otherwise."""

    differences: list[str]
    """Where the restored run differs from the same split prefilled fresh."""


class FlippedBit(NamedTuple):
    """One bit of a stored page was changed, and the prefix loaded all the same."""

    page: int
    loaded_tokens: int
    recomputed_tokens: int
    differences: list[str]


def run(*, random_weights: bool, corrupt_load: bool) -> int:
    """The whole demo; 1 if anything differs."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    console = Console()
    if console.width < _NARROWEST and not console.is_terminal:
        console = Console(width=_NARROWEST)
    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress, torch.inference_mode():
        step = _Steps(progress)
        step.begin("load the model", 1)
        subject = random_model() if random_weights else load_smollm2()
        step.advance()
        text = _read_text(subject)
        prefix = text[:, : text.shape[1] // _PAGE_SIZE * _PAGE_SIZE]
        step.begin(f"prefill {prefix.shape[1]:,} tokens of text, twice", 2)
        fresh = subject.prefill(prefix)
        step.advance()
        cache = subject.prefill(prefix)
        step.advance()
        carrier = PrefixCarrier(
            cache,
            config=subject.model.config,
            model_id=subject.name,
            num_bytes=256 << 20,
            page_size=_PAGE_SIZE,
        )
        with carrier:
            step.begin("store the prefix and drop the cache", 1)
            stored = carrier.store(cache, prefix)
            if stored is None:
                raise RuntimeError(f"{carrier.pool} is too small for {prefix.shape[1]} tokens")
            # What is freed may be handed out again as it is; then a load of nothing would do.
            for layer in cache.layers:
                layer.keys.fill_(torch.nan)
                layer.values.fill_(torch.nan)
            del cache
            step.advance()
            prompts = [
                torch.cat([text, _question_tokens(subject, question)], dim=1)
                for question in _QUESTIONS
            ]
            step.begin(
                "answer: from scratch, prefix computed anew, prefix loaded", 3 * len(prompts)
            )
            answered: list[Comparison] = []
            for question, tokens in zip(_QUESTIONS, prompts, strict=True):
                spoil = corrupt_load and not answered
                answered.append(
                    _compare(subject, carrier, stored, fresh, question, tokens, step, spoil)
                )
            step.begin("load once more, one bit of a page flipped", 2)
            flipped = _flip_a_bit(subject, carrier, stored, prompts[0], step)
        step.begin("tiny MLA model, elements of 576 and 656 bytes", len(toy_mla.ELEMENT_SIZES))
        toys = []
        for size in toy_mla.ELEMENT_SIZES:
            toys.append(toy_mla.carry(size))
            step.advance()
    console.print(_table(subject, stored, answered, flipped, toys))
    problems = _problems(stored, answered, flipped, toys)
    for problem in problems:
        console.print(f"[bold red]differs:[/] {problem}", highlight=False)
    return 1 if problems else 0


class _Steps:
    """The progress bars: one a step, of which one runs at a time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: Any = None

    def begin(self, what: str, total: int) -> None:
        self._task = self._progress.add_task(what, total=total)

    def advance(self) -> None:
        self._progress.advance(self._task)


def _read_text(subject: Subject) -> torch.Tensor:
    text = "\n\n".join((_ROOT / name).read_text(encoding="utf-8") for name in _TEXTS)
    told = f"<|im_start|>system\nAnswer questions about this text.\n\n{text}"
    return subject.encode(told)[:, : subject.text_tokens]


def _question_tokens(subject: Subject, question: str) -> torch.Tensor:
    return subject.encode(
        f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def _compare(
    subject: Subject,
    carrier: PrefixCarrier,
    stored: StoredPrefix,
    fresh: Any,
    question: str,
    tokens: torch.Tensor,
    step: _Steps,
    spoil: bool,
) -> Comparison:
    one_shot = subject.answer(tokens, subject.new_cache(), _MAX_STEPS)
    one_shot_seconds = [one_shot.first_token_secs]
    while len(one_shot_seconds) < _TIMED:
        again_from_scratch = subject.answer(tokens, subject.new_cache(), max_steps=1)
        one_shot_seconds.append(again_from_scratch.first_token_secs)
    step.advance()
    rest = tokens[:, stored.num_tokens :]
    expected = subject.answer(rest, copy.deepcopy(fresh), _MAX_STEPS)
    step.advance()
    restored = carrier.load(stored, tokens)
    if spoil:
        restored.cache.layers[0].values[0, 0, 0].view(torch.uint8)[3] ^= 1  # an exponent
    differences = _differing_bytes(restored.cache, fresh, "after the load")
    found = subject.answer(tokens[:, restored.num_tokens :], restored.cache, _MAX_STEPS)
    seconds = [restored.moved.seconds + found.first_token_secs]
    while len(seconds) < _TIMED:
        again = carrier.load(stored, tokens)
        first = subject.answer(tokens[:, again.num_tokens :], again.cache, max_steps=1)
        seconds.append(again.moved.seconds + first.first_token_secs)
    step.advance()
    differences += _differing_answers(found, expected)
    return Comparison(
        question=question,
        answer=subject.decode(found.tokens),
        steps=len(found.tokens),
        one_shot_secs=statistics.median(one_shot_seconds),
        restored_secs=statistics.median(seconds),
        load=restored.moved,
        verified_pages=restored.num_tokens // _PAGE_SIZE,
        delta=_largest_difference(found, one_shot),
        differences=[f"{question!r}: {difference}" for difference in differences],
    )


def _flip_a_bit(
    subject: Subject,
    carrier: PrefixCarrier,
    stored: StoredPrefix,
    tokens: torch.Tensor,
    step: _Steps,
) -> FlippedBit:
    page = stored.num_pages * 3 // 4
    boundary = page * _PAGE_SIZE
    fresh = subject.prefill(tokens[:, :boundary])
    step.advance()
    carrier.pool.slot_view(stored.slots[page])[_PAGE_SIZE] ^= 1
    restored = carrier.load(stored, tokens)
    differences = _differing_bytes(restored.cache, fresh, "before the flipped bit")
    if restored.num_tokens != boundary:
        differences = [f"{restored.num_tokens} tokens were loaded, not {boundary}"]
    answers = []
    for cache in (restored.cache, fresh):
        subject.compute(tokens[:, cache.get_seq_length() : stored.num_tokens], cache)
        answers.append(subject.answer(tokens[:, stored.num_tokens :], cache, _MAX_STEPS))
    step.advance()
    differences += _differing_answers(*answers)
    told = [f"with page {page} refused: {difference}" for difference in differences]
    return FlippedBit(page, restored.num_tokens, stored.num_tokens - restored.num_tokens, told)


def _differing_answers(found: Answer, expected: Answer) -> list[str]:
    differences = _differing_bytes(found.cache, expected.cache, "after the answer")
    if found.tokens != expected.tokens:
        differences.append(f"tokens {found.tokens}, expected {expected.tokens}")
    elif where := first_difference(found.logits.numpy(), expected.logits.numpy()):
        delta = _largest_difference(found, expected)
        differences.append(f"logits from step {where[0]} on, by up to {delta:.3g}")
    return differences


def _differing_bytes(found: Any, expected: Any, when: str) -> list[str]:
    """The first byte of a cache that is another, if there is one."""
    if found.get_seq_length() != expected.get_seq_length():
        counts = (found.get_seq_length(), expected.get_seq_length())
        return [f"the cache {when} holds {counts[0]} tokens, expected {counts[1]}"]
    for number, (one, other) in enumerate(zip(found.layers, expected.layers, strict=True)):
        for name in ("keys", "values"):
            pair = [getattr(layer, name).contiguous().numpy() for layer in (one, other)]
            if where := first_difference(*pair):
                _, head, token, byte = where
                at = f"layer {number}, head {head}, token {token}, byte {byte}"
                return [f"bytes of the cache {when}, first in {name} at {at}"]
    return []


def _largest_difference(one: Answer, other: Answer) -> float:
    """Of a logit, over the steps that had the same tokens before them."""
    steps = min(len(one.tokens), len(other.tokens))
    while one.tokens[: steps - 1] != other.tokens[: steps - 1]:
        steps -= 1
    return float((one.logits[:steps] - other.logits[:steps]).abs().max())


def _problems(
    stored: StoredPrefix,
    answered: list[Comparison],
    flipped: FlippedBit,
    toys: list[toy_mla.Outcome],
) -> list[str]:
    problems = [difference for one in answered for difference in one.differences]
    problems += flipped.differences
    for toy in toys:
        size = toy.element_size
        if not toy.same_logits:
            problems.append(f"toy MLA, element {size}: logits after the load")
        if not toy.control_differs:
            problems.append(f"toy MLA, element {size}: not at all, with a byte changed")
        if toy.verified_pages != 1:
            problems.append(f"toy MLA, element {size}: page 1 was not refused")
    if not stored.num_pages:
        problems.append("nothing was stored, so nothing was compared")
    return problems


def _table(
    subject: Subject,
    stored: StoredPrefix,
    answered: list[Comparison],
    flipped: FlippedBit,
    toys: list[toy_mla.Outcome],
) -> Table:
    title = (
        f"{subject.name}, float32 on the CPU: a prefix of {stored.num_tokens:,} tokens in "
        f"{stored.num_pages} pages of {_PAGE_SIZE}"
    )
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=False)
    table.add_column("what was done", ratio=1)
    table.add_column("first token\nfrom scratch", justify="right", no_wrap=True)
    table.add_column("first token\nwith kvferry", justify="right", no_wrap=True)
    table.add_column("compared with a prefix that was computed anew", ratio=1)
    for one in answered:
        faster = one.one_shot_secs / one.restored_secs
        table.add_row(
            f"{one.question}\n[dim]{_one_line(one.answer)}[/]" if one.answer else one.question,
            _secs(one.one_shot_secs),
            f"{_secs(one.restored_secs)}, {faster:.1f}x faster",
            _verdict(one.differences, f"cache bytes, and {one.steps} tokens with their logits"),
        )
    table.add_section()
    seconds = statistics.median(one.load.seconds for one in answered)
    loads = [one.load for one in answered]
    verified = min(one.verified_pages for one in answered)
    table.add_row("store the prefix", "", _speed(stored.moved), f"carried by {stored.moved.path}")
    table.add_row(
        f"load it back (median of {len(loads)})",
        "",
        _speed(loads[0]._replace(seconds=seconds)),
        f"carried by {loads[0].path}; {verified} of {stored.num_pages} pages verified",
    )
    table.add_row(
        f"load with one bit of page {flipped.page} flipped",
        "",
        f"page {flipped.page} refused",
        _verdict(flipped.differences, f"{flipped.recomputed_tokens} tokens recomputed; the answer"),
    )
    table.add_section()
    for toy in toys:
        good = toy.same_logits and toy.control_differs and toy.verified_pages == 1
        table.add_row(
            f"tiny MLA model, elements of {toy.element_size} bytes",
            "",
            f"{toy.num_bytes / 1e3:.0f} kB into other blocks",
            _verdict([] if good else [""], f"logits of {toy_mla.STEPS} tokens"),
        )
    delta = max(one.delta for one in answered)
    table.caption = (
        f"Times to the first token are medians of {_TIMED}; those with kvferry include the load. "
        f"A prompt computed in one go rounds a little differently than in two parts: logits differ "
        f"by up to {delta:.2g}."
    )
    table.caption_justify = "left"
    return table


def _verdict(differences: list[str], what: str) -> str:
    return "[bold red]differs: see below[/]" if differences else f"[green]identical[/]: {what}"


def _secs(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _speed(moved: Moved) -> str:
    speed = moved.num_bytes / moved.seconds / 1e9
    return f"{moved.num_bytes / 1e6:.1f} MB in {_secs(moved.seconds)}, {speed:.1f} GB/s"


def _one_line(answer: str) -> str:
    line = " ".join(answer.split())
    return escape(line if len(line) <= _LONGEST_ANSWER else f"{line[:_LONGEST_ANSWER]}…")

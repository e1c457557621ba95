"""What the demo does, step by step."""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import toy_mla
from demo_compare import (
    differing_answers,
    differing_bytes,
    differing_tokens,
    largest_difference,
)
from demo_engine import PAGE_SIZE, DemoEngine, Kept, Restored
from demo_models import Answer, Subject, load_smollm2, random_model
from demo_second import ask_second_process
from kvferry.adapters.transformers import CacheShape
from kvferry.testing import flip_host_bit
from kvferry.tiers import PageState
from kvferry.types import SlotKind

_ROOT = Path(__file__).parents[1]
_TEXTS = ("docs/glossary.md", "LICENSE")
_QUESTIONS = ("What is a page?", "What does the word slot mean?")
_FOLLOW_UP = "And what is a digest?"
_LATER_QUESTION = "Name the three tiers."
_MAX_STEPS = 16
_NARROWEST = 110
_FLUSH_SECS = 60.0
# Weights of the larger model, its pages, and what the second process tells.
_DISK_BYTES = 1 << 30


class Served(NamedTuple):
    """One request, as kvferry helped to serve it."""

    what: str
    answer: str
    num_tokens: int
    """Of the prompt."""

    restored: Restored
    with_kvferry_secs: float
    """To the first token, everything included that was done for it."""

    one_shot_secs: float
    """To the first token, computed from scratch; 0 where that was not done."""

    steps: int
    delta: float
    """The largest difference of a logit to the run from scratch: a split may round otherwise."""

    differences: list[str]
    """Where it differs from the same prefix computed anew, with the prompt split alike."""


class Outcome(NamedTuple):
    """All that the demo did."""

    subject: Subject
    prefix_tokens: int
    stored: Kept
    served: list[Served]
    flipped: Served
    flipped_page: int
    flush_secs: float
    flushed_pages: int
    later: Served
    corrupt_page: int | None
    ready_secs: float
    toys: list[toy_mla.Outcome]
    problems: list[str]


class NoRoomError(Exception):
    """The disk of temporary files is too full."""


class _Steps:
    """The progress bars: one a step, of which one runs at a time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: Any = None

    def begin(self, what: str, total: int = 1) -> None:
        self._task = self._progress.add_task(what, total=total)

    def advance(self) -> None:
        self._progress.advance(self._task)


def run(
    *, random_weights: bool, corrupt_load: bool, corrupt_disk: bool, storage: str | None = None
) -> int:
    """The whole demo; 1 if anything differs. `storage` is a URL; None: a folder of its own."""
    from demo_table import tables

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
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as made:
        folder = Path(made)
        if not random_weights and (free := shutil.disk_usage(folder).free) < _DISK_BYTES:
            raise NoRoomError(
                f"{free >> 20} MB are free in {folder.parent}, and the demo's second process reads "
                f"{_DISK_BYTES >> 20} MB from there: free some, set TMPDIR, or use --random-weights"
            )
        with Progress(*columns, console=console) as progress, torch.inference_mode():
            step = _Steps(progress)
            step.begin("load the model")
            subject = random_model() if random_weights else load_smollm2()
            step.advance()
            outcome = _Demo(subject, folder, step, storage).run(
                corrupt_load=corrupt_load, corrupt_disk=corrupt_disk
            )
    for table in tables(outcome):
        console.print(table)
    for problem in outcome.problems:
        console.print(f"[bold red]differs:[/] {problem}", highlight=False)
    return 1 if outcome.problems else 0


class _Demo:
    """An engine that has computed a text, and what a cache should hold of it."""

    def __init__(self, subject: Subject, folder: Path, step: _Steps, storage: str | None) -> None:
        self._subject = subject
        self._folder = folder
        self._step = step
        url = f"{(folder / 'pages').as_uri()}?capacity_bytes=512MiB"
        self._storage = (url if storage is None else storage, uuid.uuid4().hex)
        self._text = _read_text(subject)
        self._prefix = self._text[:, : self._text.shape[1] // PAGE_SIZE * PAGE_SIZE]

    def run(self, *, corrupt_load: bool, corrupt_disk: bool) -> Outcome:
        """Everything, in order."""
        subject, step, prefix = self._subject, self._step, self._prefix
        step.begin(f"prefill {prefix.shape[1]:,} tokens of text, twice", 2)
        self._fresh = subject.prefill(prefix)
        step.advance()
        self._engine = DemoEngine(subject, CacheShape.of(self._fresh), *self._storage)
        with self._engine.cache as cache:
            stored = self._engine.keep(prefix, subject.prefill(prefix))
            step.advance()
            served = self._ask_all(corrupt_load=corrupt_load)
            flipped_page = len(cache.keys(prefix[0])) * 3 // 4
            flipped, on_host = self._flip_a_bit(flipped_page)
            step.begin("write what is left to disk, and close the cache")
            started = time.perf_counter()
            flushed = cache.flush(_FLUSH_SECS)
            flush_secs = time.perf_counter() - started
            keys = cache.keys(prefix[0])
            host_pages = cache.stats().slots[SlotKind.PAGE][PageState.RESIDENT]
        step.advance()
        # In storage of the user's own there is no folder to count in; a whole flush has them all.
        num_pages = len(self._pages()) or (host_pages if flushed.complete else 0)
        problems = [] if flushed.complete else [f"not all pages came to the disk: {flushed}"]
        corrupt_page = len(keys) // 2 if corrupt_disk else None
        if corrupt_page is not None:
            self._spoil_file(keys[corrupt_page])
        later, ready_secs = self._ask_later(on_host, corrupt_page)
        if corrupt_page is not None:
            later.differences.extend(self._unnoticed(keys[corrupt_page], later.restored))
        step.begin("tiny MLA model, elements of 576 and 656 bytes", len(toy_mla.ELEMENT_SIZES))
        toys = []
        for size in toy_mla.ELEMENT_SIZES:
            toys.append(toy_mla.carry(size))
            step.advance()
        for one in (*served, flipped, later):
            problems += one.differences
        return Outcome(
            subject=subject,
            prefix_tokens=prefix.shape[1],
            stored=stored,
            served=served,
            flipped=flipped,
            flipped_page=flipped_page,
            flush_secs=flush_secs,
            flushed_pages=num_pages,
            later=later,
            corrupt_page=corrupt_page,
            ready_secs=ready_secs,
            toys=toys,
            problems=problems + _toy_problems(toys),
        )

    # ------------------------------------------------------------------------ requests

    def _ask_all(self, *, corrupt_load: bool) -> list[Served]:
        """Two questions about the text, and a follow-up to the second."""
        self._step.begin(
            "answer: from scratch, prefix computed anew, prefix loaded", 3 * (len(_QUESTIONS) + 1)
        )
        served: list[Served] = []
        computed = self._fresh
        tokens = self._text
        for question in _QUESTIONS:
            tokens = torch.cat([self._text, self._words(question)], dim=1)
            spoil = corrupt_load and not served
            one, expected = self._ask(question, tokens, self._fresh, spoil=spoil)
            served.append(one)
            tokens = torch.cat([tokens, torch.tensor([expected.tokens])], dim=1)
            computed = expected.cache
        tokens = torch.cat([tokens, self._words(_FOLLOW_UP)], dim=1)
        one, _ = self._ask(_FOLLOW_UP, tokens, computed)
        if one.restored.num_tokens <= self._prefix.shape[1]:
            one.differences.append(f"{_FOLLOW_UP!r}: found no more than the text")
        served.append(one)
        return served

    def _ask(
        self, question: str, tokens: torch.Tensor, computed: Any, *, spoil: bool = False
    ) -> tuple[Served, Answer]:
        """One request, and what it should have come to.

        Args:
            question: For the table.
            tokens: The prompt.
            computed: A cache that was computed anew, in the steps in which what is cached was.
            spoil: Change a byte of what was loaded.
        """
        subject, step = self._subject, self._step
        one_shot = subject.answer(tokens, subject.new_cache(), _MAX_STEPS)
        step.advance()
        restored = self._engine.restore(tokens)
        begin = restored.num_tokens
        kept = subject.spliced((computed, 0, begin))
        if spoil:
            restored.cache.layers[0].values[0, 0, 0].view(torch.uint8)[3] ^= 1  # an exponent
        differences = differing_bytes(restored.cache, kept, "after the load")
        if begin < self._prefix.shape[1]:
            differences.append(f"only {begin} tokens were loaded")
        found = subject.answer(tokens[:, begin:], restored.cache, _MAX_STEPS)
        step.advance()
        expected = subject.answer(tokens[:, begin:], kept, _MAX_STEPS)
        step.advance()
        differences += differing_answers(found, expected)
        if not spoil:
            generated = torch.tensor([found.tokens[:-1]], dtype=tokens.dtype)
            self._engine.keep(torch.cat([tokens, generated], dim=1), found.cache)
        served = Served(
            what=question,
            answer=subject.decode(found.tokens),
            num_tokens=tokens.shape[1],
            restored=restored,
            with_kvferry_secs=restored.seconds + found.first_token_secs,
            one_shot_secs=one_shot.first_token_secs,
            steps=len(found.tokens),
            delta=largest_difference(found, one_shot),
            differences=[f"{question!r}: {difference}" for difference in differences],
        )
        return served, expected

    def _flip_a_bit(self, page: int) -> tuple[Served, Any]:
        """The first question again, with one bit of a page on the host flipped.

        Also gives the prefix as it is on the host afterwards: that page was computed again.
        """
        subject, step = self._subject, self._step
        step.begin("load once more, one bit of a page flipped", 2)
        tokens = torch.cat([self._text, self._words(_QUESTIONS[0])], dim=1)
        engine, end, size = self._engine, self._prefix.shape[1], PAGE_SIZE
        flip_host_bit(engine.cache, engine.cache.keys(tokens[0])[page], byte=size)
        restored = engine.restore(tokens)
        begin = restored.num_tokens
        kept = subject.spliced((self._fresh, 0, page * size))
        differences = differing_bytes(restored.cache, kept, "before the flipped bit")
        if restored.bad_pages != (page,):
            differences.append(f"bad pages are {restored.bad_pages}")
        found = subject.answer(tokens[:, begin:], restored.cache, _MAX_STEPS)
        step.advance()
        expected = subject.answer(tokens[:, begin:], kept, _MAX_STEPS)
        step.advance()
        differences += differing_answers(found, expected)
        engine.keep(tokens, subject.spliced((found.cache, 0, tokens.shape[1])))
        on_host = subject.spliced(
            (self._fresh, 0, page * size),
            (expected.cache, page * size, (page + 1) * size),
            (self._fresh, (page + 1) * size, end),
        )
        served = Served(
            what=_QUESTIONS[0],
            answer="",
            num_tokens=tokens.shape[1],
            restored=restored,
            with_kvferry_secs=restored.seconds + found.first_token_secs,
            one_shot_secs=0.0,
            steps=len(found.tokens),
            delta=0.0,
            differences=[f"with page {page} refused: {one}" for one in differences],
        )
        return served, on_host

    def _ask_later(self, on_host: Any, corrupt_page: int | None) -> tuple[Served, float]:
        """A new question, to a process that has never seen the text."""
        subject, step = self._subject, self._step
        step.begin("start a second process, and ask it something else", 3)
        tokens = torch.cat([self._text, self._words(_LATER_QUESTION)], dim=1)
        model = self._folder / "model"
        subject.save(model)
        step.advance()
        report = ask_second_process(subject, model, self._storage, tokens, _MAX_STEPS, self._folder)
        step.advance()
        restored, begin = report.restored, report.restored.num_tokens
        wanted = self._prefix.shape[1] if corrupt_page is None else corrupt_page * PAGE_SIZE
        kept = subject.spliced((on_host, 0, wanted))
        differences = differing_bytes(restored.cache, kept, "after the load")
        if not restored.verified or restored.from_disk != wanted:
            differences.append(f"{restored.from_disk} tokens are from disk, {begin} were verified")
        expected = subject.answer(tokens[:, wanted:], kept, _MAX_STEPS)
        differences += differing_tokens(report.answer, expected)
        one_shot = subject.answer(tokens, subject.new_cache(), _MAX_STEPS)
        step.advance()
        served = Served(
            what=_LATER_QUESTION,
            answer=subject.decode(report.answer.tokens),
            num_tokens=tokens.shape[1],
            restored=restored,
            with_kvferry_secs=restored.seconds + report.answer.first_token_secs,
            one_shot_secs=one_shot.first_token_secs,
            steps=len(report.answer.tokens),
            delta=largest_difference(report.answer, one_shot),
            differences=[f"second process: {one}" for one in differences],
        )
        return served, report.ready_secs

    # ------------------------------------------------------------------------ files

    def _pages(self) -> list[Path]:
        return sorted((self._folder / "pages").glob("??/*.kvo"))

    def _spoil_file(self, key: bytes) -> None:
        """Flip one bit in the middle of the file of a page."""
        (path,) = (found for found in self._pages() if found.stem == key.hex())
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))

    def _unnoticed(self, key: bytes, restored: Restored) -> list[str]:
        """What should have become of a file that was spoilt, and has not."""
        told = []
        if restored.disk_reason != "corrupt":
            told.append(f"second process: the spoilt file went unnoticed: {restored.disk_reason!r}")
        quarantine = self._folder / "pages" / "quarantine"
        if not any(key.hex() in found.name for found in quarantine.glob("*.kvo")):
            told.append("second process: the spoilt file was not put away")
        return told

    def _words(self, question: str) -> torch.Tensor:
        return self._subject.encode(
            f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )


def _read_text(subject: Subject) -> torch.Tensor:
    text = "\n\n".join((_ROOT / name).read_text(encoding="utf-8") for name in _TEXTS)
    told = f"<|im_start|>system\nAnswer questions about this text.\n\n{text}"
    return subject.encode(told)[:, : subject.text_tokens]


def _toy_problems(toys: list[toy_mla.Outcome]) -> list[str]:
    problems = []
    for toy in toys:
        size = toy.element_size
        if not toy.same_logits:
            problems.append(f"toy MLA, element {size}: logits after the load")
        if not toy.control_differs:
            problems.append(f"toy MLA, element {size}: not at all, with a byte changed")
        if toy.verified_pages != 1:
            problems.append(f"toy MLA, element {size}: page 1 was not refused")
    return problems

"""The tables that the demo ends with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

import toy_mla
from demo_engine import PAGE_SIZE

if TYPE_CHECKING:
    from demo_run import Outcome, Served

_LONGEST_ANSWER = 44


def tables(outcome: Outcome) -> Iterator[Table]:
    """Requests with their time to the first token; then what was moved for them."""
    yield _requests(outcome)
    yield _moves(outcome)


def _requests(outcome: Outcome) -> Table:
    table = Table(
        title=f"{outcome.subject.name}, float32 on the CPU: requests that begin with the same "
        f"{outcome.prefix_tokens:,} tokens",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("request", ratio=3)
    table.add_column("loaded tokens", justify="right", no_wrap=True)
    table.add_column("first token\nfrom scratch", justify="right", no_wrap=True)
    table.add_column("first token\nwith kvferry", justify="right", no_wrap=True)
    table.add_column("compared with a prefix computed anew", ratio=2)
    for number, one in enumerate(outcome.served):
        is_last = number == len(outcome.served) - 1
        notes = ["[cyan]goes on from the answer above[/]"] if is_last else []
        _add(table, one, notes, f"cache bytes, {one.steps} tokens and their logits")
    flipped, page = outcome.flipped, outcome.flipped_page
    again = flipped.num_tokens - flipped.restored.num_tokens
    table.add_section()
    _add(
        table,
        flipped,
        [f"[yellow]one bit of page {page} flipped on the host[/]"],
        f"page {page} refused, {again} tokens computed",
    )
    table.add_section()
    later = outcome.later
    notes = ["[cyan]asked of a second process, which finds the text on disk[/]"]
    verdict = f"cache bytes, {later.steps} tokens and their logits"
    if outcome.corrupt_page is not None:
        notes.append(f"[yellow]one bit of the file of page {outcome.corrupt_page} flipped[/]")
        verdict = f"file {outcome.corrupt_page} refused and put away; {verdict}"
    _add(table, later, notes, verdict)
    delta = max(one.delta for one in (*outcome.served, later))
    table.caption = (
        f"First token with kvferry: looking up, reading, loading, checking and computing the rest. "
        f"A prompt computed in one go rounds a little differently than in parts: logits differ by "
        f"up to {delta:.2g}. The second process was ready {outcome.ready_secs:.1f} s after its "
        f"start, its model loaded; what came after that counts."
    )
    table.caption_justify = "left"
    return table


def _add(table: Table, one: Served, notes: list[str], verdict: str) -> None:
    restored = one.restored
    where = "disk" if restored.from_disk else "host"
    answer = [f"[dim]{_one_line(one.answer)}[/]"] if one.answer else []
    secs = _secs(one.with_kvferry_secs)
    if one.one_shot_secs > one.with_kvferry_secs:
        secs += f"\n[dim]{one.one_shot_secs / one.with_kvferry_secs:.1f}x faster[/]"
    table.add_row(
        "\n".join([one.what, *answer, *notes]),
        f"{restored.num_tokens:,} of {one.num_tokens:,}\n[dim]from {where}[/]",
        _secs(one.one_shot_secs) if one.one_shot_secs else "",
        secs,
        _verdict(one.differences, verdict),
    )


def _moves(outcome: Outcome) -> Table:
    table = Table(title="What was moved", title_justify="left", title_style="bold")
    table.add_column("what", ratio=3)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("speed", justify="right", no_wrap=True)
    table.add_column("", ratio=2)
    stored, later = outcome.stored, outcome.later.restored
    _add_move(
        table, f"store the text on the host, {stored.num_pages} pages", stored.num_bytes,
        stored.seconds, f"pages of {PAGE_SIZE} tokens",
    )  # fmt: skip
    loaded = outcome.served[1].restored
    pages = loaded.num_bytes // (stored.num_bytes // stored.num_pages)
    _add_move(
        table, "load it from the host", loaded.num_bytes, loaded.seconds,
        f"by {loaded.path}; {loaded.num_tokens // PAGE_SIZE} of {pages} pages verified",
    )  # fmt: skip
    page_bytes = stored.num_bytes // stored.num_pages
    table.add_row(
        "write to disk, beside all this",
        _megabytes(outcome.flushed_pages * page_bytes),
        "",
        "",
        f"{outcome.flushed_pages} files; {_secs(outcome.flush_secs)} of waiting at the end",
    )
    fetched = later.from_disk // PAGE_SIZE
    _add_move(
        table, "read from disk to the host, second process", fetched * page_bytes, later.disk_secs,
        f"{fetched} files, checksums right",
    )  # fmt: skip
    _add_move(
        table, "load it from the host, second process", later.num_bytes,
        later.seconds - later.disk_secs,
        f"by {later.path}; {later.num_tokens // PAGE_SIZE} of {fetched} pages verified",
    )  # fmt: skip
    table.add_section()
    for toy in outcome.toys:
        good = toy.same_logits and toy.control_differs and toy.verified_pages == 1
        table.add_row(
            f"tiny MLA model, elements of {toy.element_size} bytes, into other blocks",
            f"{toy.num_bytes / 1e3:.0f} kB",
            "",
            "",
            _verdict([] if good else [""], f"logits of {toy_mla.STEPS} tokens"),
        )
    return table


def _add_move(table: Table, what: str, num_bytes: int, seconds: float, told: str) -> None:
    table.add_row(what, _megabytes(num_bytes), _secs(seconds), _speed(num_bytes, seconds), told)


def _verdict(differences: list[str], what: str) -> str:
    return "[bold red]differs: see below[/]" if differences else f"[green]identical[/]: {what}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _speed(num_bytes: int, seconds: float) -> str:
    per_sec = num_bytes / seconds
    return f"{per_sec / 1e9:.1f} GB/s" if per_sec >= 1e9 else f"{per_sec / 1e6:.0f} MB/s"


def _secs(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _one_line(answer: str) -> str:
    line = " ".join(answer.split())
    return escape(line if len(line) <= _LONGEST_ANSWER else f"{line[:_LONGEST_ANSWER]}…")

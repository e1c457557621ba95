"""Pictures of a replay: hits over the course of the trace, in letters and as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvferry.replay.simulation import ReplayResult, Share

__all__ = ["text_plot", "write_plot"]

_TEXT_ROWS = 10
_TEXT_WIDTH = 50
_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 40, 56
_HOST, _STORAGE, _INFINITE = "#1b6ca8", "#d1660a", "#6e7781"
_INK, _GRID = "#24292f", "#d8dee4"
_STEPS = 5


def text_plot(result: ReplayResult) -> list[str]:
    """A line for each tenth of the trace: ``#`` host, ``+`` storage, ``.`` dropped too early."""
    lines = [f"{'requests':>15}  hits of all pages: # host, + storage, . dropped too early"]
    for first, share in _numbered(_merged(result.shares, _TEXT_ROWS)):
        pages = max(1, share.pages)
        ends = [
            round(_TEXT_WIDTH * part / pages)
            for part in (share.host, share.host + share.storage, share.infinite)
        ]
        # Rounding must not make a bar longer than what it is a part of.
        bar = "#" * ends[0] + "+" * (ends[1] - ends[0]) + "." * max(0, ends[2] - ends[1])
        found = (share.host + share.storage) / pages
        last = first + share.requests - 1
        lines.append(f"{first:>7} -{last:>6}  {found:>6.1%}  {bar}".rstrip())
    return lines


def write_plot(result: ReplayResult, path: str | Path) -> None:
    """The hit ratio of every part of the trace as SVG: tiers as areas, nothing dropped as a line.

    Raises:
        OSError: The file cannot be written.
    """
    Path(path).write_text("\n".join(_svg(result)) + "\n", encoding="utf-8")


def _svg(result: ReplayResult) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12" fill="{_INK}">'
    )
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
    for step in range(_STEPS + 1):
        y = _y(step / _STEPS)
        yield f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="{_GRID}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{step / _STEPS:.0%}</text>'
    shares = result.shares
    if shares:
        both = [(one.host + one.storage) / max(1, one.pages) for one in shares]
        yield _area(shares, both, _STORAGE)
        yield _area(shares, [one.host / max(1, one.pages) for one in shares], _HOST)
        line = _path(shares, [one.infinite / max(1, one.pages) for one in shares])
        yield f'<path d="M{line}" fill="none" stroke="{_INFINITE}" stroke-width="2"/>'
    yield (
        f'<text x="{_LEFT}" y="{_TOP - 16}" font-weight="bold">hit ratio over {result.requests:,} '
        f"requests: {result.hit_ratio:.3f}, and {result.hit_ratio_infinite:.3f} if nothing were "
        f"dropped</text>"
    )
    at = _LEFT
    for name, colour in (("host", _HOST), ("storage", _STORAGE), ("nothing dropped", _INFINITE)):
        y = _HEIGHT - 24
        yield f'<rect x="{at}" y="{y}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{at + 18}" y="{y + 10}">{name}</text>'
        at += 120
    yield "</svg>"


def _area(shares: Sequence[Share], ratios: Sequence[float], colour: str) -> str:
    bottom = _y(0)
    line = _path(shares, ratios)
    return f'<path d="M{_LEFT},{bottom} L{line} L{_WIDTH - _RIGHT},{bottom} Z" fill="{colour}"/>'


def _path(shares: Sequence[Share], ratios: Sequence[float]) -> str:
    """A step for each share, as wide as its requests are many."""
    total = sum(share.requests for share in shares)
    width = _WIDTH - _LEFT - _RIGHT
    done, points = 0, []
    for share, ratio in zip(shares, ratios, strict=True):
        for edge in (done, done + share.requests):
            points.append(f"{_LEFT + width * edge / total:.1f},{_y(ratio)}")
        done += share.requests
    return " L".join(points)


def _y(ratio: float) -> float:
    return round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * ratio, 1)


def _merged(shares: Sequence[Share], most: int) -> list[Share]:
    """Neighbours added up, until there are at most `most`."""
    size = -(-len(shares) // most) if shares else 1
    groups = [shares[at : at + size] for at in range(0, len(shares), size)]
    return [Share(*(sum(column) for column in zip(*group, strict=True))) for group in groups]


def _numbered(shares: Sequence[Share]) -> Iterator[tuple[int, Share]]:
    first = 1
    for share in shares:
        yield first, share
        first += share.requests

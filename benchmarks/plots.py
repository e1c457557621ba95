"""The pictures of the README, from what `make gpu` wrote: SVG, drawn here, with no library.

    python3 benchmarks/plots.py benchmarks/results/gpu-nvidia-h200.json

`throughput.svg` has GB/s over the element size of both movers, with M as a line; `beside.svg` what
is left of it beside compute. Of several files the steps are taken together, the later file's where
both have one. A picture there are no figures for says so.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parent / "gpu"))
from results import BASELINES, Row, results_of, rows_of, together

_IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"

_WIDTH, _HEIGHT = 860, 340
_TOP, _BOTTOM, _LEFT = 56, 64, 52
_PANEL_WIDTH = 360
_COLOURS = {"staged": "#1b6ca8", "direct": "#d1660a", "memcpy": "#6e7781"}
_INK, _GRID = "#24292f", "#d8dee4"
_WAYS = {"h2d": "load (H2D)", "d2h": "store (D2H)"}
_COMPUTE = {"none": "idle", "gemm": "GEMM", "gemv": "GEMV"}

Points = Sequence[tuple[float, float]]


class _Panel(NamedTuple):
    """A part of a picture, with GB/s upwards."""

    left: float
    width: float
    most: int
    """GB/s at its top, a multiple of 10."""

    @property
    def bottom(self) -> float:
        return _HEIGHT - _BOTTOM

    def y(self, gb_per_sec: float) -> float:
        return self.bottom - (self.bottom - _TOP) * gb_per_sec / self.most

    def frame(self, title: str) -> Iterator[str]:
        """Grid, figures at its left, and a title."""
        for value in range(0, self.most + 1, 10):
            y = self.y(value)
            yield _line(self.left, y, self.left + self.width, y, _GRID)
            yield _text(self.left - 8, y + 4, str(value), anchor="end")
        yield _text(self.left, _TOP - 12, title, bold=True)

    def link(self, value: float) -> Iterator[str]:
        """M, as a line."""
        y = self.y(value)
        yield _line(self.left, y, self.left + self.width, y, _INK, dashed=True)
        yield _text(self.left + self.width, y - 5, f"M {value:.1f}", anchor="end")


def main() -> int:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "results", type=pathlib.Path, nargs="+", help="JSON files that make gpu wrote"
    )
    parser.add_argument("--folder", type=pathlib.Path, default=_IMAGES, help="(%(default)s)")
    args = parser.parse_args()
    told = together([json.loads(file.read_text()) for file in args.results])
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (("throughput", throughput), ("beside", beside)):
        file = args.folder / f"{name}.svg"
        file.write_text("\n".join(draw(told)) + "\n")
        print(file)
    return 0


def throughput(told: Mapping[str, Any]) -> Iterator[str]:
    """GB/s over the element size, at device run 1; a panel a direction."""
    results = results_of(told)
    links = [
        result["link"]
        for name, result in results.items()
        if name.startswith(("direct_", "staged_"))
    ]
    series = {
        mover: {way: _points(results, mover, way) for way in _WAYS}
        for mover in ("staged", "direct")
    }
    sizes = sorted({x for by_way in series.values() for each in by_way.values() for x, _ in each})
    yield from _begin(
        f"GB/s over the element size, single tokens; {told['machine']['gpu']}",
        {"staged": "staged, page_major host pool", "direct": "direct, layer_first host pool"},
    )
    if not sizes:
        yield from _no_figures("direct,staged")
        return
    most = max(
        *(link[way] for link in links for way in _WAYS),
        *(y for by_way in series.values() for each in by_way.values() for _, y in each),
    )
    for panel, (way, title) in zip(_panels(most), _WAYS.items(), strict=True):
        yield from panel.frame(title)
        x_of = _log_scale(panel, sizes[0], sizes[-1])
        for size in _ticks(sizes):
            yield _text(x_of(size), panel.bottom + 18, f"{size:,.0f}", anchor="middle")
        middle = panel.left + panel.width / 2
        yield _text(middle, panel.bottom + 38, "bytes of a token in a layer", anchor="middle")
        yield from panel.link(max(link[way] for link in links))
        for mover, by_way in series.items():
            yield from _curve([(x_of(x), panel.y(y)) for x, y in by_way[way]], _COLOURS[mover])
    yield "</svg>"


def beside(told: Mapping[str, Any]) -> Iterator[str]:
    """Bars of transfers beside compute, and of plain copies beside the same."""
    results = results_of(told)
    rows = [row for row in rows_of(results, "beside") if row["direction"] in _WAYS]
    movers = [mover for mover in _COLOURS if any(row["mover"] == mover for row in rows)]
    yield from _begin(
        f"GB/s beside compute that runs all the time; {told['machine']['gpu']}",
        {mover: "one plain copy" if mover == "memcpy" else mover for mover in movers},
    )
    if not rows:
        yield from _no_figures("beside")
        return
    link = results["beside"]["link"]
    most = max(link["h2d"], link["d2h"], *(row["gb_per_sec"] for row in rows))
    for panel, (way, title) in zip(_panels(most), _WAYS.items(), strict=True):
        yield from panel.frame(title)
        yield from panel.link(link[way])
        of_way = [row for row in rows if row["direction"] == way]
        computes = [name for name in _COMPUTE if any(row["compute"] == name for row in of_way)]
        for place, name in enumerate(computes):
            room = panel.width / len(computes)
            bars = [row for row in of_way if row["compute"] == name]
            yield from _bars(panel, panel.left + place * room, room, bars, movers)
            middle = panel.left + (place + 0.5) * room
            yield _text(middle, panel.bottom + 18, _COMPUTE[name], anchor="middle", bold=True)
            slower = [row for row in bars if "slowdown" in row and row["mover"] != "memcpy"]
            if slower:
                text = f"{slower[0]['slowdown'] * 100:+.1f} % time"
                yield _text(middle, panel.bottom + 36, text, anchor="middle")
    yield "</svg>"


def _panels(most: float) -> list[_Panel]:
    """One for each direction, side by side, with room for `most` GB/s."""
    top = 10 * math.ceil((most + 2) / 10)
    return [
        _Panel(_LEFT + index * (_PANEL_WIDTH + 70), _PANEL_WIDTH, top)
        for index in range(len(_WAYS))
    ]


def _points(results: Mapping[str, Mapping[str, Any]], mover: str, way: str) -> Points:
    """By element size GB/s at device run 1; of several transfers the largest's."""
    layout = "page_major" if mover == "staged" else "layer_first"
    found: dict[int, Row] = {}
    for name in results:
        if not name.startswith(("direct_", "staged_")):
            continue
        for row in rows_of(results, name):
            if (
                row["what"] in BASELINES
                or row.get("mover", "direct") != mover
                or (row["host_layout"], row["device_run"]) != (layout, 1)
                or row.get("host_run", 8) < 8
                or row.get("blocks")
            ):
                continue
            size = row["element_size"]
            if size not in found or row["num_bytes"] > found[size]["num_bytes"]:
                found[size] = row
    return [(float(size), float(found[size][way])) for size in sorted(found)]


def _log_scale(panel: _Panel, least: float, most: float) -> Any:
    room = math.log2(most / least) or 1.0

    def x_of(value: float) -> float:
        return panel.left + 10 + (panel.width - 20) * math.log2(value / least) / room

    return x_of


def _ticks(sizes: Sequence[float]) -> Iterator[float]:
    """Powers of 4 within the sizes, so that no two texts meet."""
    tick = 4.0 ** math.ceil(math.log(sizes[0], 4))
    if tick > sizes[-1]:
        yield sizes[0]
    while tick <= sizes[-1]:
        yield tick
        tick *= 4


def _curve(points: Points, colour: str) -> Iterator[str]:
    if not points:
        return
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def _bars(
    panel: _Panel, left: float, room: float, rows: Sequence[Row], movers: Sequence[str]
) -> Iterator[str]:
    width = min(44.0, 0.8 * room / len(movers))
    first = left + (room - width * len(movers)) / 2
    for row in rows:
        x, y = first + movers.index(row["mover"]) * width, panel.y(row["gb_per_sec"])
        yield (
            f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}" '
            f'height="{panel.bottom - y:.1f}" fill="{_COLOURS[row["mover"]]}"/>'
        )
        # In the bar, or above one that is too low for it.
        inside = panel.bottom - y > 20
        yield _text(
            x + width / 2,
            y + 14 if inside else y - 4,
            f"{row['gb_per_sec']:.1f}",
            anchor="middle",
            colour="#ffffff" if inside else _INK,
        )


def _begin(title: str, legend: Mapping[str, str]) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12" role="img">'
    )
    yield f"<title>{html.escape(title)}</title>"
    # A page may be dark; the texts are not.
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
    yield _text(_LEFT, 20, title, bold=True)
    x = float(_LEFT)
    for name, text in legend.items():
        y = _HEIGHT - 18
        yield f'<rect x="{x}" y="{y}" width="11" height="11" fill="{_COLOURS[name]}"/>'
        yield _text(x + 16, y + 10, text)
        x += 40 + 7 * len(text)


def _no_figures(steps: str) -> Iterator[str]:
    text = f'no figures yet: make gpu GPU_ARGS="--only {steps}"'
    yield _text(_WIDTH / 2, _HEIGHT / 2, text, anchor="middle")
    yield "</svg>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    bold: bool = False,
    colour: str = _INK,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{html.escape(text)}</text>"
    )


if __name__ == "__main__":
    sys.exit(main())

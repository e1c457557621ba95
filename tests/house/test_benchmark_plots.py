"""The pictures of the README: drawn from what `make gpu` wrote, by a script with no library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "benchmarks" / "plots.py"
_SVG = "{http://www.w3.org/2000/svg}"
_LINK = {"h2d": 55.0, "d2h": 53.0}


def _row(mover: str, size: int, h2d: float, **more: Any) -> dict[str, Any]:
    return {
        "element_size": size, "device_run": 1, "num_bytes": 500_000_000, "what": mover,
        "host_layout": "page_major" if mover == "staged" else "layer_first", "host_run": 8,
        "mover": mover, "h2d": h2d, "d2h": h2d - 1, **more,
    }  # fmt: skip


def _bar(mover: str, compute: str, direction: str, **more: Any) -> dict[str, Any]:
    told = {"mover": mover, "compute": compute, "direction": direction, "gb_per_sec": 41.5}
    return told | more


_THROUGHPUT = [
    _row("direct", 132, 40.0),
    _row("direct", 1152, 46.0),
    _row("staged", 132, 47.0),
    _row("staged", 656, 49.0),
    _row("staged", 37440, 49.5),
    # None of these is drawn.
    _row("staged", 656, 20.0, num_bytes=1000),
    _row("staged", 999, 30.0, device_run=64),
    _row("staged", 998, 30.0, host_run=1),
    _row("direct", 997, 30.0, what="grouped"),
]
_BESIDE = [
    _bar("memcpy", "none", "h2d"),
    _bar("staged", "none", "h2d"),
    _bar("staged", "gemm", "h2d", slowdown=0.0125, gb_per_sec=1.5),
    _bar("staged", "gemm", "d2h", slowdown=0.02),
    _bar("staged", "none", "both", gb_per_sec=99.0),
]


def _draw(tmp_path: Path, steps: dict[str, Any]) -> dict[str, ElementTree.Element]:
    """Both pictures, by name."""
    results = tmp_path / "gpu.json"
    results.write_text(json.dumps({"machine": {"gpu": "NVIDIA <H999>"}, "steps": steps}))
    subprocess.run(
        [sys.executable, str(_SCRIPT), str(results), "--folder", str(tmp_path / "images")],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return {
        file.stem: ElementTree.fromstring(file.read_text())  # noqa: S314 (we wrote it)
        for file in (tmp_path / "images").iterdir()
    }


def _texts(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{_SVG}text")]


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, ElementTree.Element]:
    """Drawn from made-up figures of all steps."""
    steps = {
        "pytest": {"result": None},
        "direct_a": {"result": {"link": _LINK, "rows": _THROUGHPUT[:2]}},
        "staged_a": {"result": {"link": _LINK, "rows": _THROUGHPUT[2:]}},
        "beside": {"result": {"link": _LINK, "rows": _BESIDE}},
    }
    return _draw(tmp_path, steps)


def test_both_movers_are_curves_below_the_line_of_m(
    pictures: dict[str, ElementTree.Element],
) -> None:
    """Each direction has a curve a mover, of the largest transfers, and M above them."""
    picture = pictures["throughput"]
    curves = [curve.attrib["points"].split() for curve in picture.iter(f"{_SVG}polyline")]
    assert [len(curve) for curve in curves] == [3, 2, 3, 2]
    lines = [line for line in picture.iter(f"{_SVG}line") if "stroke-dasharray" in line.attrib]
    assert len(lines) == 2
    for line, curve in zip(lines, (curves[0], curves[2]), strict=True):
        heights = [float(point.split(",")[1]) for point in curve]
        assert heights == sorted(heights, reverse=True)  # y goes down, and these GB/s go up
        assert float(line.attrib["y1"]) < min(heights)
    assert {"M 55.0", "M 53.0", "256", "4,096"} <= set(_texts(picture))


def test_compute_has_bars_with_their_figures(pictures: dict[str, ElementTree.Element]) -> None:
    """A bar for each mover and compute, as high as its GB/s; both directions at once has none."""
    picture = pictures["beside"]
    bars = [bar for bar in picture.iter(f"{_SVG}rect") if float(bar.attrib.get("height", 0)) > 0]
    heights = [float(bar.attrib["height"]) for bar in bars if bar.attrib["width"] not in ("11",)]
    assert len(heights[1:]) == 4  # the first is the ground
    assert heights[1] == heights[2] == heights[4] > 20 * heights[3]
    texts = _texts(picture)
    assert texts.count("41.5") == 3
    assert {"1.5", "GEMM", "idle", "+1.2 % time"} <= set(texts)
    assert "99.0" not in texts


def test_everything_is_inside(pictures: dict[str, ElementTree.Element]) -> None:
    """No curve, bar or text begins outside of its picture."""
    for picture in pictures.values():
        _, _, width, height = map(float, picture.attrib["viewBox"].split())
        for part in picture.iter():
            for across, down in (("x", "y"), ("cx", "cy"), ("x1", "y1"), ("x2", "y2")):
                if across in part.attrib:
                    assert 0 <= float(part.attrib[across]) <= width
                    assert 0 <= float(part.attrib[down]) <= height


def test_without_figures_a_picture_says_so(tmp_path: Path) -> None:
    """It names the steps that bring them, and the name of a GPU cannot break it."""
    for name, picture in _draw(tmp_path, {}).items():
        assert any(text.startswith("no figures yet: make gpu") for text in _texts(picture)), name
        assert any("NVIDIA <H999>" in text for text in _texts(picture)), name


def test_the_readme_shows_them() -> None:
    """Both are in docs/images, and the README has them with words for those who cannot see them."""
    readme = (_ROOT / "README.md").read_text()
    for name in ("throughput", "beside"):
        _, found, rest = readme.partition(f"](docs/images/{name}.svg)")
        assert found, name
        assert rest
        alt = readme.partition(f"](docs/images/{name}.svg)")[0].rpartition("![")[2]
        assert len(alt) > 40
        ElementTree.parse(_ROOT / "docs" / "images" / f"{name}.svg")  # noqa: S314

"""Every command and example in the README and in docs/ is run, or checked, as it stands.

A block's first word is its language. What a document may hold:

    ```python              run in a fresh interpreter
    ```bash                ``kvferry ...`` is run; ``make TARGET`` must be a target of the Makefile;
                           ``pip install`` must name this project and extras that exist
    ```json file=NAME      written to NAME, for the blocks after it; so is ```python file=NAME
    ```text output         exactly what the block before it prints

The blocks of one document run in order, in one temporary folder. A block below a line
``<!-- not run: reason -->`` is left out. Blocks in other languages are text.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry import Geometry
from kvferry.env import VARIABLES
from kvferry.errors import GeometryError
from kvferry.geometry.kv_dtype import KV_DTYPES

_ROOT = Path(__file__).parents[2]
_DOCUMENTS = [
    _ROOT / "README.md",
    _ROOT / "CONTRIBUTING.md",
    *sorted((_ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(r"^```(?P<info>.*)$")
_NOT_RUN = re.compile(r"^<!-- not run: (?P<reason>\S.*) -->$")
_TARGET = re.compile(r"^(?P<name>[a-z-]+):", re.MULTILINE)
_LINK = re.compile(r"\]\((?P<path>[^)#\s]+)(#[^)\s]*)?\)")


class _DocumentError(Exception):
    """A block that does not do what the document says."""


@dataclasses.dataclass(frozen=True)
class _Block:
    line: int
    info: str
    body: str


def _blocks(text: str) -> Iterator[_Block]:
    """The fenced blocks of a document that are not excused from running."""
    lines, begin, info, excused = text.splitlines(), 0, "", False
    for number, line in enumerate(lines, start=1):
        fence = _FENCE.match(line)
        if not fence:
            continue
        if not begin:
            begin, info = number, fence["info"].strip()
            before = next((row for row in reversed(lines[: number - 1]) if row.strip()), "")
            excused = bool(_NOT_RUN.match(before))
            continue
        if not excused:
            yield _Block(begin, info, "\n".join(lines[begin : number - 1]) + "\n")
        begin = 0
    if begin:
        raise _DocumentError(f"line {begin}: the block never ends")


def _run(arguments: list[str], folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])}
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    if ran.returncode:
        raise _DocumentError(f"exit {ran.returncode}\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def _check_pip(words: list[str]) -> None:
    pyproject = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    extras = set(pyproject["project"]["optional-dependencies"])
    wanted = re.fullmatch(r"(kvferry|\.)(\[(?P<extras>[-a-z0-9,]+)\])?", words[-1])
    if len(words) != 3 or not wanted:
        raise _DocumentError("only `pip install kvferry[extras]` or `.[extras]` can be checked")
    unknown = set((wanted["extras"] or "").split(",")) - {""} - extras
    if unknown:
        raise _DocumentError(f"there is no extra {', '.join(sorted(unknown))}")


def _check_make(words: list[str]) -> None:
    targets = {found["name"] for found in _TARGET.finditer((_ROOT / "Makefile").read_text())}
    named = [word for word in words[1:] if "=" not in word]
    if not named or set(named) - targets:
        raise _DocumentError(f"the Makefile has the targets {', '.join(sorted(targets))}")


def _run_bash(body: str, folder: Path) -> str:
    printed = ""
    for line in body.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        try:
            if words[0] == "kvferry":
                printed += _run(["-m", *words], folder)
            elif words[0] == "make":
                _check_make(words)
            elif words[:2] == ["pip", "install"]:
                _check_pip(words)
            else:
                raise _DocumentError("neither kvferry, make nor pip install: nothing checks it")
        except _DocumentError as error:
            raise _DocumentError(f"{line.strip()}: {error}") from None
    return printed


def _check(text: str, folder: Path) -> int:
    """Run every block of a document in `folder`; how many there were."""
    printed, count = "", 0
    for block in _blocks(text):
        language, *rest = block.info.split() or [""]
        try:
            if language in ("json", "python") and rest and rest[0].startswith("file="):
                (folder / Path(rest[0].removeprefix("file=")).name).write_text(block.body)
            elif language == "python":
                printed = _run(["-c", block.body], folder)
            elif language == "bash":
                printed = _run_bash(block.body, folder)
            elif [language, *rest] == ["text", "output"]:
                if printed != block.body:
                    raise _DocumentError(f"what was printed is\n{printed}")
            elif language in ("sh", "shell", "console", "py"):
                raise _DocumentError(f"write bash or python instead of {language}")
        except _DocumentError as error:
            raise _DocumentError(f"line {block.line}: {error}") from None
        count += 1
    return count


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: str(path.relative_to(_ROOT)))
def test_documents_do_what_they_say(path: Path, tmp_path: Path) -> None:
    """Each block of the document runs, and prints what it is shown to print."""
    count = _check(path.read_text(), tmp_path)
    if path.name == "README.md":
        assert count > 0


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: str(path.relative_to(_ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """Each relative link of the document names a file of the repository."""
    links = [found["path"] for found in _LINK.finditer(path.read_text())]
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (path.parent / link).exists()] == []


@pytest.mark.parametrize(
    "document",
    [
        "```python\nraise SystemExit(3)\n```",
        "```bash\nkvferry no-such-command\n```",
        "```bash\nmake no_such_target\n```",
        "```bash\npip install kvferry[nothing]\n```",
        "```bash\npip install '.[nothing]'\n```",
        "```bash\npip install something-else\n```",
        "```bash\nrm -r build\n```",
        "```console\nkvferry --version\n```",
        "```python\nprint(1)\n```\n```text output\n2\n```",
        "```python\nprint(1)\n",
    ],
)
def test_a_false_document_is_seen(document: str, tmp_path: Path) -> None:
    """Blocks that fail, cannot be checked or print something else fail the check."""
    with pytest.raises(_DocumentError):
        _check(document, tmp_path)


def test_a_true_document_passes(tmp_path: Path) -> None:
    """Files, commands, output and excuses work as the module says."""
    document = (
        '```json file=a.json\n{"x": 7}\n```\n'
        "```python\nimport json\nprint(json.load(open('a.json'))['x'])\n```\n"
        "```text output\n7\n```\n"
        "```python file=b.py\nraise SystemExit(4)\n```\n"
        "```python\nassert 'SystemExit(4)' in open('b.py').read()\n```\n"
        "```bash\npip install kvferry[cuda13,transformers]\nmake test PYTEST_ARGS=-q  # all\n```\n"
        "<!-- not run: it would remove things -->\n\n```bash\nrm -r build\n```\n"
    )
    assert _check(document, tmp_path) == 6


def test_the_readme_names_every_variable() -> None:
    """The README's table is that of `kvferry.env`: names, types, defaults and meanings."""
    rows = re.findall(r"^\| `KVFERRY_.*$", (_ROOT / "README.md").read_text(), re.MULTILINE)
    known = [f"| `{v.name}` | {v.kind} | {v.default} | {v.meaning} |" for v in VARIABLES]
    assert rows == known


def _kv_dtype_rows() -> dict[str, tuple[list[str], str, str]]:
    """By name: the other names, the latent row and the keys, as docs/geometry.md has them."""
    table = (_ROOT / "docs" / "geometry.md").read_text().partition("## KV dtypes")[2]
    rows = {}
    for line in re.findall(r"^\| `.*\|$", table.partition("**Sparse")[0], re.MULTILINE):
        name, others, _, latent, keys = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name.strip("`")] = (re.findall(r"`([^`]+)`", others), latent, keys)
    return rows


def test_the_geometry_page_has_every_kv_dtype() -> None:
    """The table of docs/geometry.md has each name that is taken, and no other."""
    rows = _kv_dtype_rows()
    names = [*rows, *(other for others, _, _ in rows.values() for other in others)]
    assert sorted(names) == sorted(KV_DTYPES)


@pytest.mark.parametrize("name", sorted(set(_kv_dtype_rows()) - {"auto"}))
def test_the_sizes_of_a_kv_dtype_are_true(name: str) -> None:
    """The bytes in the table of docs/geometry.md are those of the planes."""
    _, latent, keys = _kv_dtype_rows()[name]
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 8, "head_dim": 128}
    mla = {**sizes, "kv_lora_rank": 512, "qk_rope_head_dim": 64}

    def told(plane: str, config: dict[str, int]) -> str:
        try:
            planes = Geometry.from_hf_config(config, kv_dtype=name).planes
        except GeometryError:
            return "refused"
        found = [one.element_size for one in planes if one.name.removesuffix("_scale") == plane]
        return " + ".join(f"{size:,}" for size in found)

    assert told("k", sizes) == keys
    assert told("latent", mla) == latent.partition(";")[0]
    with_indexer = told("latent", {**mla, "index_head_dim": 128})
    if ";" not in latent:
        assert with_indexer == latent
    elif "not with" in latent:
        assert with_indexer == "refused"
    else:
        assert latent.endswith(f"with an indexer {with_indexer}")

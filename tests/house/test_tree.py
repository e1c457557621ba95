"""The shape of the source tree: sizes, names, doors, and who may say an engine's name."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry

_ROOT = Path(__file__).parents[2]
_PACKAGE = Path(kvferry.__file__).parent
_MAX_LINES = 400
_EMPTY_NAMES = re.compile(r"^_?(utils?|common|helpers?|misc|manager\d+)$")
_ENGINES = ("sglang", "transformers", "vllm")

# Who else may name an engine, and why. A path here that no longer does so fails the test.
_MAY_NAME_AN_ENGINE: dict[str, str] = {}


def _modules() -> list[Path]:
    return sorted(_PACKAGE.rglob("*.py"))


def _packages() -> list[str]:
    doors = sorted(_PACKAGE.rglob("__init__.py"))
    return [".".join(("kvferry", *door.parent.relative_to(_PACKAGE).parts)) for door in doors]


def _test_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("test_"):
            yield node


def test_modules_stay_small() -> None:
    """No module is longer than 400 lines."""
    lines = {str(path): len(path.read_text().splitlines()) for path in _modules()}
    assert len(lines) > 5
    assert {path: count for path, count in lines.items() if count > _MAX_LINES} == {}


def test_names_say_something() -> None:
    """No module or folder is called utils, common, helpers or the like."""
    parts = {
        part for path in _modules() for part in path.relative_to(_PACKAGE).with_suffix("").parts
    }
    assert [part for part in sorted(parts) if _EMPTY_NAMES.match(part)] == []


@pytest.mark.parametrize("name", ["utils", "_util", "common", "helpers", "manager2"])
def test_empty_names_are_recognised(name: str) -> None:
    """The pattern above matches the names it is meant to keep out."""
    assert _EMPTY_NAMES.match(name)


def test_engines_are_named_in_their_own_file_only() -> None:
    """vLLM, SGLang and transformers appear in their adapter and nowhere else in the package."""
    found = set()
    for path in _modules():
        relative = path.relative_to(_PACKAGE).as_posix()
        text = path.read_text().lower()
        for engine in _ENGINES:
            own = re.match(rf"adapters/{engine}(\.py|/)", relative)
            # The adapters' door must be able to say which file to open.
            if engine in text and not own and relative != "adapters/__init__.py":
                found.add(relative)
    assert found == set(_MAY_NAME_AN_ENGINE)


def _resolves(module: object, name: str) -> bool:
    """Whether a door has what it promises, as far as can be told without the engine."""
    try:
        return hasattr(module, name)
    except ModuleNotFoundError as missing:
        return missing.name in _ENGINES


@pytest.mark.parametrize("package", _packages())
def test_every_door_is_explicit(package: str) -> None:
    """Each package has an `__all__` without doubles whose names resolve."""
    module = importlib.import_module(package)
    names = module.__all__
    assert len(set(names)) == len(names)
    assert [name for name in names if not _resolves(module, name)] == []


def test_every_folder_has_a_door() -> None:
    """Each folder of modules is a package with an `__init__.py`."""
    folders = {path.parent for path in _modules()}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


# A parameter that is called environ is none of the process's.
_READS_THE_ENVIRONMENT = re.compile(r"\.environb?\b|\bgetenvb?\b|\bimport\b.*\benvironb?\b")


def test_the_environment_is_read_in_one_place() -> None:
    """Only env.py touches the process's environment."""
    readers = [str(path.relative_to(_PACKAGE)) for path in _modules()
               if _READS_THE_ENVIRONMENT.search(path.read_text())]  # fmt: skip
    assert readers == ["env.py"]


@pytest.mark.parametrize(
    ("line", "is_seen"),
    [
        ("os.environ['KVFERRY_X']", True),
        ("posix.environb.get(b'X')", True),
        ("os.getenv('KVFERRY_X')", True),
        ("from os import environ", True),
        ("from os import path, environ as variables", True),
        ("def resolve(environ: Mapping[str, str]) -> None: ...", False),
        ("config_file(environ)", False),
    ],
)
def test_readers_of_the_environment_are_recognised(line: str, is_seen: bool) -> None:
    """The pattern above tells the process's environment from a mapping of that name."""
    assert bool(_READS_THE_ENVIRONMENT.search(line)) is is_seen


def _side_entrances(source: str, folder: str) -> list[str]:
    """Imports that reach into another folder's modules, past its `__init__.py`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            root, *rest = name.split(".")
            if root != "kvferry" or len(rest) < 2 or rest[0] == folder:
                continue
            if _PACKAGE.joinpath(*rest).with_suffix(".py").exists():
                found.append(name)
    return found


def test_folders_are_entered_by_their_door() -> None:
    """No module imports a module inside another folder; `__init__.py` is the only way in."""
    found = []
    for path in _modules():
        folder, *inside = path.relative_to(_PACKAGE).parts
        # `python -m kvferry` and the console script start the same function.
        if path != _PACKAGE / "__main__.py":
            own = folder if inside else ""
            found += [f"{path}: {name}" for name in _side_entrances(path.read_text(), own)]
    assert found == []


@pytest.mark.parametrize(
    ("line", "is_seen"),
    [
        ("from kvferry.geometry.spec import Geometry", True),
        ("from kvferry.geometry import spec", True),
        ("import kvferry.geometry.spec", True),
        ("from kvferry.geometry import Geometry", False),
        ("from kvferry.memory.mapping import HostMapping", False),
    ],
)
def test_side_entrances_are_seen(line: str, is_seen: bool) -> None:
    """The check above tells a module of another folder from a name at its door."""
    assert bool(_side_entrances(line, "memory")) is is_seen


def test_the_package_is_typed() -> None:
    """The marker that lets type checkers read kvferry's annotations is in place."""
    assert (_PACKAGE / "py.typed").exists()


def test_every_test_says_what_it_is_about() -> None:
    """Each test has a docstring, and the tests are no package."""
    silent = []
    for path in sorted((_ROOT / "tests").rglob("*.py")):
        assert path.name != "__init__.py"
        for function in _test_functions(ast.parse(path.read_text())):
            if not ast.get_docstring(function):
                silent.append(f"{path.relative_to(_ROOT)}:{function.lineno} {function.name}")
    assert silent == []

"""The wheel holds the package and nothing else, and works without the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.compiler import c_compiler

import kvferry

_ROOT = Path(__file__).parents[2]
_PACKAGE = Path(kvferry.__file__).parent
_KERNEL = "kvferry/kernels/_host_move.abi3.so"
# Without a compiler the wheel is still to be whole and to work. setuptools would go by the one
# that Python was built with.
_COMPILER = c_compiler()


def _build(tree: Path, **variables: str) -> Path:
    """A wheel built from a copy of the tree, with the pinned build back end."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(_ROOT / name, tree)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    shutil.copytree(_PACKAGE.parent, tree / "src", ignore=ignored, dirs_exist_ok=True)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", "."],
        cwd=tree,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = (tree / "out").glob("*.whl")
    return found


def _packed(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def _sources() -> set[str]:
    return {
        f"kvferry/{path.relative_to(_PACKAGE).as_posix()}"
        for path in _PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built as a user would."""
    return _build(tmp_path_factory.mktemp("tree"), CC=_COMPILER or "/bin/false")


def test_the_wheel_holds_the_package(wheel: Path) -> None:
    """It has the package, the kernel if there is a compiler, the licence, and nothing else."""
    assert wheel.name.startswith(f"kvferry-{kvferry.__version__}-cp311-abi3-linux")
    assert _packed(wheel) == _sources() | ({_KERNEL} if _COMPILER else set())
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_package_builds_without_a_compiler(tmp_path: Path) -> None:
    """Where compiling fails the wheel has no kernel, not even one that an earlier build left."""
    if _COMPILER:
        assert _KERNEL in _packed(_build(tmp_path, CC=_COMPILER))
    assert _packed(_build(tmp_path, CC="/bin/false")) == _sources()


def test_the_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere, the package imports and its command answers."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "kvferry = kvferry.cli.main:main" in archive.read(name).decode()
    script = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import kvferry; print(kvferry.__file__); "
        "from kvferry.kernels import native_library; print(native_library()); "
        "from kvferry.cli.main import main; sys.exit(main())"
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-c", script, str(tmp_path), "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
    )
    assert ran.returncode == 0, ran.stderr
    where, library, version = ran.stdout.splitlines()
    assert where.startswith(str(tmp_path))
    assert (str(tmp_path / _KERNEL) in library) if _COMPILER else (library == "None")
    assert kvferry.__version__ in version

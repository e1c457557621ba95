"""`import kvferry` is free: it loads, reads and sets up nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import kvferry

_PACKAGE = Path(kvferry.__file__).parent
_HEAVY = (
    *("accelerate", "cuda", "gguf", "numpy", "prometheus_client", "rich", "sglang", "torch"),
    *("transformers", "vllm"),
)

# Runs in a fresh interpreter. The hook cannot be taken out again, and it must be in before the
# import: hence a child. Argument 1 is the folder to import from.
_CHILD = """
import json, os, sys
opened, read = [], []
inner = os._Environ.__getitem__
def getitem(self, key):
    read.append(key if isinstance(key, str) else os.fsdecode(key))
    return inner(self, key)
os._Environ.__getitem__ = getitem
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        opened.append(os.path.realpath(os.fsdecode(args[0])))
sys.path.insert(0, sys.argv[1])
sys.addaudithook(hook)
import kvferry
modules, files, names = sorted(sys.modules), list(opened), list(read)
logging = sys.modules.get("logging")
handlers = []
if logging is not None:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [repr(h) for logger in loggers for h in getattr(logger, "handlers", [])]
print(json.dumps({"modules": modules, "files": files, "names": names, "handlers": handlers,
                  "package": os.path.dirname(os.path.realpath(kvferry.__file__))}))
"""


def _observe(folder: Path) -> dict[str, Any]:
    """What `import kvferry` from `folder` does, seen from a fresh interpreter."""
    child = subprocess.run(
        [sys.executable, "-I", "-B", "-c", _CHILD, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "KVFERRY_PROBE": "1"},
    )
    seen: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return seen


def _complaints(seen: dict[str, Any]) -> set[str]:
    """The kinds of promise that an import broke."""
    # The import system itself opens the standard library's modules.
    stdlib = os.path.realpath(os.__file__).rpartition("/")[0]
    allowed = (seen["package"] + "/", stdlib + "/")
    broken = set()
    if {name.partition(".")[0] for name in seen["modules"]} & set(_HEAVY):
        broken.add("modules")
    if any(not path.startswith(allowed) or "/site-packages/" in path for path in seen["files"]):
        broken.add("files")
    if any(name.startswith("KVFERRY_") for name in seen["names"]):
        broken.add("environment")
    if seen["handlers"]:
        broken.add("handlers")
    return broken


def test_import_is_free() -> None:
    """Importing kvferry loads no framework, opens no foreign file, reads no variable of ours."""
    seen = _observe(_PACKAGE.parent)
    assert seen["package"] == str(_PACKAGE.resolve())
    assert _complaints(seen) == set(), seen


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("import numpy", "modules"),
        ("open('/etc/hostname').close()", "files"),
        ("import os; os.environ.get('KVFERRY_PROBE')", "environment"),
        ("import logging; logging.getLogger('kvferry').addHandler(logging.NullHandler())",
         "handlers"),
    ],
)  # fmt: skip
def test_the_probe_sees_what_it_is_for(tmp_path: Path, body: str, complaint: str) -> None:
    """A package that breaks one of the promises is caught by the very same check."""
    (tmp_path / "kvferry").mkdir()
    (tmp_path / "kvferry" / "__init__.py").write_text(body + "\n")
    assert complaint in _complaints(_observe(tmp_path))


def test_version_is_the_distribution_s() -> None:
    """`kvferry.__version__` is the version in pyproject.toml."""
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert kvferry.__version__ == pyproject["project"]["version"]

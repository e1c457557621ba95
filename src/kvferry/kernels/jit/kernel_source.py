"""What a kernel is made of: a translation unit, its headers, its defines, and the key of all that.

Headers are found here, by reading the `#include` lines, and handed to the compiler as text. So the
key covers every byte that the compiler sees, the compiler opens no file, and it makes no difference
whether the package lies in a folder or in a zip archive.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import re
from collections.abc import Iterator, Mapping
from importlib.resources.abc import Traversable
from typing import NamedTuple

from kvferry.errors import KernelSourceError

__all__ = ["Header", "KernelSource", "cubin_key"]

# Part of every key. Raise it whenever the same inputs are to give other cubins than before.
_KEY_SCHEMA = 1

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[ \t]*(?P<what>.*)$", re.MULTILINE)
_QUOTED = re.compile(r'"(?P<name>[^"]+)"')
_DEFINE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Header(NamedTuple):
    """A file that a kernel includes, under the name that its `#include` line gives."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class KernelSource:
    """A translation unit with all it includes. Its kernels are `extern "C"`."""

    name: str
    """Its file, relative to the source folder; compiler messages show it."""
    text: str
    headers: tuple[Header, ...] = ()
    """Sorted by name."""
    defines: tuple[tuple[str, str], ...] = ()
    """Preprocessor names and values, sorted."""

    @classmethod
    def packaged(cls, name: str, defines: Mapping[str, int | str] | None = None) -> KernelSource:
        """The unit `name` of kvferry's own kernels; see `read`."""
        folder = importlib.resources.files("kvferry.kernels").joinpath("csrc")
        return cls.read(folder, name, defines)

    @classmethod
    def read(
        cls, folder: Traversable, name: str, defines: Mapping[str, int | str] | None = None
    ) -> KernelSource:
        """The unit `name` under `folder`, with everything it includes.

        Each `#include "..."` is relative to `folder`, wherever the including file lies. Those in
        angle brackets are left to the compiler, which has no folder to look in.

        Raises:
            KernelSourceError: a file that is not there, an include that is computed by a macro, or
                a define that is not a plain name with a value of one line.
        """
        text = _text(folder, name, "the kernel source")
        headers: dict[str, str] = {}
        pending = [(name, text)]
        while pending:
            includer, includer_text = pending.pop()
            for included in _includes(includer, includer_text):
                if included not in headers:
                    headers[included] = _text(folder, included, f"included by {includer},")
                    pending.append((included, headers[included]))
        return cls(
            name=name,
            text=text,
            headers=tuple(Header(*item) for item in sorted(headers.items())),
            defines=tuple(sorted(_define(*item) for item in (defines or {}).items())),
        )

    @property
    def define_options(self) -> tuple[str, ...]:
        """The defines as compiler options."""
        return tuple(f"-D{name}={value}" for name, value in self.defines)


def cubin_key(source: KernelSource, arch: str, options: tuple[str, ...], compiler: str) -> str:
    """64 hex digits that name the cubin of `source` for `arch`.

    Args:
        source: the unit with all its headers.
        arch: the target, such as `sm_90`.
        options: every compiler option that is not in `source` or `arch`.
        compiler: name and full version of the compiler.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"kvferry-cubin")
    parts = [str(_KEY_SCHEMA), compiler, arch, source.name, source.text]
    for group in (options, source.define_options):
        parts += [str(len(group)), *group]
    parts.append(str(len(source.headers)))
    for header in source.headers:
        parts += header
    for part in parts:
        # With its length in front no part can be mistaken for the end of another.
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _text(folder: Traversable, name: str, role: str) -> str:
    """The file `name` under `folder`; KernelSourceError where it is not, or would lie outside."""
    parts = name.split("/")
    if "" in parts or "." in parts or ".." in parts:
        raise KernelSourceError(
            f"{role} {name!r} must be a plain path below {folder}; write it relative to that folder"
        )
    file = folder.joinpath(*parts)
    if not file.is_file():
        raise KernelSourceError(
            f"{role} {name!r} is not in {folder}; paths there are relative to that folder. If "
            "kvferry was installed without it, install it again"
        )
    return file.read_text(encoding="utf-8")


def _includes(includer: str, text: str) -> Iterator[str]:
    """The names that `text` includes in quotes."""
    for line in _INCLUDE.finditer(text):
        what = line["what"]
        quoted = _QUOTED.match(what)
        if quoted:
            yield quoted["name"]
        elif not what.startswith("<"):
            raise KernelSourceError(
                f"{includer}: cannot tell what `#include {what}` includes, so its text would be "
                "missing from the kernel's key; name the file in quotes"
            )


def _define(name: str, value: int | str) -> tuple[str, str]:
    text = str(int(value)) if isinstance(value, int) else value
    if not _DEFINE_NAME.match(name) or "\n" in text:
        raise KernelSourceError(
            f"define {name!r} = {text!r}: the name must be a C identifier and the value one line"
        )
    return name, text

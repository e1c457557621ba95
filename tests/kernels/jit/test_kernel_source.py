"""What makes a kernel: its headers are found, and every byte of it is in its key."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest

from kvferry.errors import KernelSourceError
from kvferry.kernels.jit import OPTIONS, Header, KernelSource, cubin_key

_COMPILER = "nvrtc 13.0.88"


def _write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def _key(source: KernelSource, arch: str = "sm_90") -> str:
    return cubin_key(source, arch, OPTIONS, _COMPILER)


def test_headers_are_found_through_headers(tmp_path: Path) -> None:
    """Headers of headers, cycles, other folders and odd spacing; names are from the root."""
    _write(
        tmp_path,
        k_cu='#include "a.cuh"\n  #  include  "deep/b.cuh" // why\n#include <stdint.h>\n',
        a_cuh='#include "deep/b.cuh"\n',
        deep__b_cuh='#include "a.cuh"\n#include "c.cuh"\n',
        c_cuh="// nothing\n",
        unused_cuh="// not included\n",
    )
    source = KernelSource.read(tmp_path, "k.cu")
    assert [header.name for header in source.headers] == ["a.cuh", "c.cuh", "deep/b.cuh"]
    assert all((tmp_path / name).read_text() == text for name, text in source.headers)


def test_sources_are_read_from_a_zip_archive(tmp_path: Path) -> None:
    """A package that lies in a zip archive has its kernels all the same."""
    _write(tmp_path, k_cu='#include "deep/b.cuh"\n', deep__b_cuh="#define B\n")
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for name in ("k.cu", "deep/b.cuh"):
            archive.write(tmp_path / name, f"csrc/{name}")
    with zipfile.ZipFile(tmp_path / "package.zip") as archive:
        packed = KernelSource.read(zipfile.Path(archive, "csrc/"), "k.cu")
    assert packed == KernelSource.read(tmp_path, "k.cu")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('#include "absent.cuh"\n', "included by k.cu, 'absent.cuh' is not in"),
        ('#include "../k.cu"\n', "must be a plain path"),
        ('#include "/etc/hostname"\n', "must be a plain path"),
        ("#include WHERE\n", "cannot tell what"),
    ],
)
def test_includes_that_cannot_be_followed_are_refused(tmp_path: Path, text: str, said: str) -> None:
    """A header that would be missing from the key is an error that names it."""
    _write(tmp_path, k_cu=text)
    with pytest.raises(KernelSourceError, match=said):
        KernelSource.read(tmp_path, "k.cu")


def test_a_unit_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """So is a unit without a file, in the package too."""
    with pytest.raises(KernelSourceError, match=r"'k\.cu' is not in"):
        KernelSource.read(tmp_path, "k.cu")
    with pytest.raises(KernelSourceError, match="install it again"):
        KernelSource.packaged("no_such_kernel.cu")


@pytest.mark.parametrize("defines", [{"A B": 1}, {"1A": 1}, {"A": "1\n#define B"}, {"": 1}])
def test_bad_defines_are_refused(tmp_path: Path, defines: dict[str, int | str]) -> None:
    """A define is a C identifier with a value of one line."""
    _write(tmp_path, k_cu="")
    with pytest.raises(KernelSourceError, match="identifier"):
        KernelSource.read(tmp_path, "k.cu", defines)


def test_defines_become_options(tmp_path: Path) -> None:
    """Whatever their order, with truth as 1 and 0."""
    _write(tmp_path, k_cu="")
    source = KernelSource.read(tmp_path, "k.cu", {"WORD": "uint4", "CHECK": True, "N": -3})
    assert source.define_options == ("-DCHECK=1", "-DN=-3", "-DWORD=uint4")
    assert source == KernelSource.read(tmp_path, "k.cu", {"N": -3, "CHECK": 1, "WORD": "uint4"})


def test_the_key_covers_everything(tiny: KernelSource) -> None:
    """Each input of the compiler, changed alone, gives another key; unchanged, the same."""
    base = dataclasses.replace(tiny, defines=(("A", "1"), ("B", "2")))
    keys = [
        _key(base),
        _key(dataclasses.replace(base, name="other.cu")),
        _key(dataclasses.replace(base, text=base.text + " ")),
        _key(dataclasses.replace(base, headers=(Header("amount.cuh", "#define AMOUNT 4\n"),))),
        _key(dataclasses.replace(base, headers=(Header("amounts.cuh", base.headers[0].text),))),
        _key(dataclasses.replace(base, headers=())),
        _key(dataclasses.replace(base, defines=(("A", "1"),))),
        _key(dataclasses.replace(base, defines=(("A", "1"), ("B", "3")))),
        _key(base, "sm_80"),
        cubin_key(base, "sm_90", OPTIONS[:1], _COMPILER),
        cubin_key(base, "sm_90", OPTIONS, "nvrtc 13.0.89"),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 and int(key, 16) for key in keys)
    assert keys[0] == _key(dataclasses.replace(base))


def test_the_key_keeps_its_parts_apart(tiny: KernelSource) -> None:
    """Text that moves from one part to its neighbour gives another key."""
    one = dataclasses.replace(tiny, headers=(Header("a", "bc"), Header("d", "")))
    other = dataclasses.replace(tiny, headers=(Header("ab", "c"), Header("", "d")))
    assert _key(one) != _key(other)
    as_option = cubin_key(tiny, "sm_90", ("-DX=1",), _COMPILER)
    as_define = cubin_key(dataclasses.replace(tiny, defines=(("X", "1"),)), "sm_90", (), _COMPILER)
    assert as_option != as_define


def test_the_key_is_the_same_for_ever(tiny: KernelSource) -> None:
    """A key made by one process is good for all others, so it is spelt out here."""
    source = KernelSource("k.cu", "text", (Header("h.cuh", "more"),), (("N", "1"),))
    assert cubin_key(source, "sm_90", ("--std=c++17",), "nvrtc 13.0.88") == (
        "d2ead5d7933c8bcbb0b21df789b19b00850a0f76414963acb4dc8b464600b6a7"
    )

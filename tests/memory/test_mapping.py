"""Committed host memory: present at once, aligned, closed once and never under a view."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from kvferry.errors import BudgetError, ConfigError, PoolClosedError, PoolInUseError
from kvferry.memory import HostMapping, mapping

MIB = 1 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _locked_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck:"))


def test_memory_is_committed_at_allocation() -> None:
    """Resident memory grows by the whole size before a byte is touched; a bare mmap does not."""
    size = 96 * MIB
    before = _resident_bytes()
    with HostMapping(size):
        grown = _resident_bytes() - before
    before = _resident_bytes()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        bare = _resident_bytes() - before
    assert grown >= size * 0.99
    assert bare < size * 0.1


def test_old_kernels_touch_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel cannot populate, each page is touched, and the mapping says so."""
    monkeypatch.setattr(mapping, "_MADV_POPULATE_WRITE", 0x7FFF)
    size = 96 * MIB
    before = _resident_bytes()
    with HostMapping(size) as mapped:
        assert _resident_bytes() - before >= size * 0.99
        assert mapped.commit_method == "touch"


def test_commit_goes_over_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that is no multiple of the piece is committed to its last page."""
    monkeypatch.setattr(mapping, "_COMMIT_PIECE_BYTES", 4 * MIB)
    size = 62 * MIB + 5
    before = _resident_bytes()
    with HostMapping(size):
        assert _resident_bytes() - before >= size * 0.99


@pytest.mark.parametrize("alignment", [1, 4096, 65536, 2 * MIB])
def test_alignment(alignment: int) -> None:
    """The address keeps the alignment, at least the system's page, and all bytes are zero."""
    with HostMapping(3 * MIB + 1, alignment=alignment) as mapped:
        assert mapped.address % max(alignment, mmap.PAGESIZE) == 0
        view = mapped.view
        assert len(view) == mapped.num_bytes == 3 * MIB + 1
        assert bytes(view) == bytes(3 * MIB + 1)
        view[-1] = 7
        assert mapped.view[-1] == 7
        del view


def test_close_twice_then_use() -> None:
    """A second close is nothing; every use after it raises."""
    mapped = HostMapping(1)
    mapped.close()
    mapped.close()
    assert mapped.closed
    for use in (lambda: mapped.address, lambda: mapped.view, mapped.__enter__):
        with pytest.raises(PoolClosedError, match=r"1 bytes .* after close"):
            use()


def test_close_gives_memory_back() -> None:
    """Resident memory falls by the size on close."""
    mapped = HostMapping(96 * MIB)
    before = _resident_bytes()
    mapped.close()
    assert before - _resident_bytes() >= 96 * MIB * 0.99


def test_close_under_a_view_is_refused() -> None:
    """A view is never left over unmapped memory: close raises, and works once it is gone."""
    mapped = HostMapping(10)
    view = mapped.view[2:4]
    with pytest.raises(PoolInUseError, match="drop those first"):
        mapped.close()
    view[0] = 1
    assert mapped.view[2] == 1
    view.release()
    mapped.close()
    assert mapped.closed


def test_error_in_a_with_block_is_not_hidden() -> None:
    """An exception that leaves the block stays the exception; the refused close is a note."""

    def fail_with_a_view() -> None:
        with HostMapping(10) as mapped:
            view = mapped.view
            view[0] = 1 // 0

    with pytest.raises(ZeroDivisionError) as caught:
        fail_with_a_view()
    assert any("not closed" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("size", [1 << 60, 1 << 70])
def test_more_than_the_system_has(size: int) -> None:
    """A refused map is a budget error that names the size."""
    with pytest.raises(BudgetError, match=str(size)):
        HostMapping(size)


@pytest.mark.parametrize(("size", "alignment"), [(0, 1), (-5, 1), (1, 0), (1, 3), (1, -4)])
def test_bad_arguments(size: int, alignment: int) -> None:
    """Sizes below 1 and alignments that are no power of two are refused."""
    with pytest.raises(ConfigError, match=f"={size if size < 1 else alignment}"):
        HostMapping(size, alignment=alignment)


def test_locked_memory_is_locked() -> None:
    """mlock covers the size, and close lets it go."""
    before = _locked_bytes()
    with HostMapping(MIB, locked=True):
        assert _locked_bytes() - before >= MIB
    assert _locked_bytes() == before

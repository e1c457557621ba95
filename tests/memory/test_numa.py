"""NUMA: the node of a device, memory from there, and a note where that cannot be."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.geometry import Geometry, Plane
from kvferry.memory import HostMapping, HostPool, backing, device_node, linux_calls, mapping, numa

MIB = 1 << 20


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A sysfs with two nodes and three devices; the last one's node is not told."""
    for name, node in (("0000:65:00.0", "1"), ("0001:17:00.1", "0"), ("0000:b3:00.0", "-1")):
        folder = tmp_path / "bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    (tmp_path / "devices/system/node").mkdir(parents=True)
    (tmp_path / "devices/system/node/online").write_text("0-1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("bus_id", "node"),
    [
        ("0000:65:00.0", 1),
        ("00000000:65:00.0", 1),
        ("65:00.0", 1),
        ("0001:17:00.1", 0),
        ("00000001:17:00.1", 0),
        ("0000:B3:00.0", None),
        ("0000:66:00.0", None),
    ],
)
def test_the_node_of_a_device(system: Path, bus_id: str, node: int | None) -> None:
    """By its PCI address in all forms that drivers give, so that no visible number misleads."""
    assert device_node(bus_id, sys_root=system) == node


@pytest.mark.parametrize("wrong", ["", "0", "GPU-12", "0000:65:00", "../65:00.0", "0000:65:00.9"])
def test_what_is_no_address_of_a_device(system: Path, wrong: str) -> None:
    """Refused by name; nothing outside the folder of devices is read."""
    with pytest.raises(ConfigError, match="PCI address"):
        device_node(wrong, sys_root=system)


def test_which_node_is_meant(system: Path) -> None:
    """A number is itself, auto that of the device, None none; what is not known is noted."""
    assert numa.choose_node(3, None) == (3, "")
    assert numa.choose_node(None, "0000:65:00.0", sys_root=system) == (None, "")
    assert numa.choose_node("auto", "0000:65:00.0", sys_root=system) == (1, "")
    node, note = numa.choose_node("auto", "0000:b3:00.0", sys_root=system)
    assert (node, "does not tell that of 0000:b3:00.0" in note) == (None, True)
    node, note = numa.choose_node("auto", None, sys_root=system)
    assert (node, "no device" in note) == (None, True)


def test_a_machine_with_one_node_has_nothing_to_say(system: Path) -> None:
    """There the firmware often tells no node, and it does not matter."""
    (system / "devices/system/node/online").write_text("0\n")
    assert numa.choose_node("auto", "0000:b3:00.0", sys_root=system) == (None, "")


@pytest.mark.parametrize("wrong", [-1, True, 1.0, "gpu"])
def test_other_nodes_are_refused(wrong: int) -> None:
    """By mappings and by pools."""
    with pytest.raises(ConfigError, match="numa_node="):
        HostMapping(1, numa_node=wrong)
    with pytest.raises(ConfigError, match="numa_node="):
        HostPool(_geometry(), num_slots=1, numa_node=wrong)


def test_memory_is_bound_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, to that node, while no page is there yet; what came is counted."""
    bound: list[tuple[int, int, int]] = []
    touched: list[int] = []
    monkeypatch.setattr(linux_calls, "prefer_node", lambda *call: bound.append(call))
    monkeypatch.setattr(linux_calls, "advise", lambda *_: touched.append(len(bound)), raising=True)
    monkeypatch.setattr(mapping, "placement_note", lambda *_: (4 * MIB, ""))
    with HostMapping(4 * MIB, numa_node=1) as made:
        assert bound == [(made.address, 4 * MIB, 1)]
        assert touched == [1]
        assert (made.backing.node, made.backing.node_bytes) == (1, 4 * MIB)
        assert made.backing.notes == ()
        assert "node 1 for all of it" in str(made.backing)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_without_the_right_to_bind(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A container without CAP_SYS_NICE: one note, and the pool works."""

    def refuse(*_: int) -> None:
        raise OSError(code, "not you")

    monkeypatch.setattr(linux_calls, "prefer_node", refuse)
    with HostPool(_geometry(), num_slots=4, numa_node=1, huge_pages="never") as pool:
        assert pool.backing.node is None
        (note,) = pool.backing.notes
        assert "not bound to node 1 (not you)" in note
        assert "CAP_SYS_NICE" in str(pool.backing)
        assert "ordinary pages, 1 note in backing" in repr(pool)
        pool.slot_view(3)[:] = bytes(pool.slot_bytes)


def test_a_pool_goes_to_the_node_of_its_device(
    monkeypatch: pytest.MonkeyPatch, system: Path
) -> None:
    """`auto` follows the device's address."""
    asked: list[int] = []
    monkeypatch.setattr(linux_calls, "prefer_node", lambda _a, _n, node: asked.append(node))
    monkeypatch.setattr(numa.choose_node, "__kwdefaults__", {"sys_root": system}, raising=True)
    with HostPool(
        _geometry(), num_slots=1, numa_node="auto", device_bus_id="00000000:65:00.0"
    ) as pool:
        assert asked == [1]
        assert pool.backing.node == 1


def test_the_real_system_binds_to_its_first_node() -> None:
    """mbind as it is: either all pages lie on node 0, or a note says why not."""
    with HostMapping(8 * MIB, numa_node=0) as made:
        found = made.backing
        if found.node is None:
            assert "not bound to node 0" in found.notes[0]
        elif found.node_bytes is not None and not found.notes:
            assert found.node_bytes >= 8 * MIB * 0.99


def test_a_node_that_is_not_there_is_a_note() -> None:
    """The real system refuses it, and the memory is there all the same."""
    for node in (1000, 5000):
        with HostMapping(MIB, numa_node=node) as made:
            assert made.backing.node is None
            assert f"not bound to node {node}" in made.backing.notes[0]


_NUMA_MAPS = """\
10000 default heap anon=9 N0=9 kernelpagesize_kB=4
200000 prefer:1 anon=256 dirty=256 active=0 N0=3 N1=253 kernelpagesize_kB=4
300000 prefer:1 anon=1 N1=1 kernelpagesize_kB=2048
500000 default anon=77 N0=77 kernelpagesize_kB=4
"""


def test_pages_are_counted_by_node(tmp_path: Path) -> None:
    """In the range alone, each with the size of its pages; no file is no answer."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/numa_maps").write_text(_NUMA_MAPS)
    found = backing.bytes_by_node(0x200000, 0x500000, proc_root=tmp_path)
    assert found == {0: 3 * 4096, 1: 253 * 4096 + 2 * MIB}
    assert backing.bytes_by_node(0x600000, 0x700000, proc_root=tmp_path) is None
    assert backing.bytes_by_node(0, 1 << 40, proc_root=tmp_path / "none") is None


def test_a_node_that_had_too_little_room_is_told(tmp_path: Path) -> None:
    """Below 99 % there is a note with both sizes, from there on none."""
    (tmp_path / "self").mkdir()
    maps = tmp_path / "self/numa_maps"
    for there, is_noted in ((200, False), (198, False), (197, True), (0, True)):
        maps.write_text(f"200000 prefer:1 N0={200 - there} N1={there} kernelpagesize_kB=4\n")
        counted, note = numa.placement_note(0x200000, 200 * 4096, 1, proc_root=tmp_path)
        assert counted == there * 4096
        assert bool(note) is is_noted
        assert not is_noted or f"({200 * 4096} B)" in note
    assert numa.placement_note(0, 1, 1, proc_root=tmp_path / "none") == (None, "")


def _geometry() -> Geometry:
    return Geometry(planes=(Plane(name="k", num_layers=1, element_size=64),), page_size=16)

"""NUMA: which node a device is at, and memory that comes from there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from kvferry.errors import ConfigError
from kvferry.memory import linux_calls
from kvferry.memory.backing import bytes_by_node
from kvferry.memory.budget import format_bytes

__all__ = ["NodeChoice", "bind", "choose_node", "device_node", "placement_note"]

_BUS_ID = re.compile(
    r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE
)
_ENOUGH = 0.99


class NodeChoice(NamedTuple):
    """The node to take memory from, and why there is none."""

    node: int | None
    note: str = ""


def device_node(bus_id: str, *, sys_root: str | Path = "/sys") -> int | None:
    """The NUMA node of the device at `bus_id`, such as ``0000:65:00.0``; None: it is not told.

    The driver's name for a device says which one it is whatever CUDA_VISIBLE_DEVICES renames; its
    eight digits for a domain are understood. Raises ConfigError for what is no such name.
    """
    found = _BUS_ID.fullmatch(bus_id)
    if found is None:
        raise ConfigError(f"bus_id={bus_id!r}: give a PCI address, such as 0000:65:00.0")
    name = f"{int(found['domain'] or '0', 16):04x}:{found['rest'].lower()}"
    try:
        node = int(Path(sys_root, "bus/pci/devices", name, "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # -1: the firmware does not say.
    return node if node >= 0 else None


def choose_node(
    asked: int | str | None, bus_id: str | None, *, sys_root: str | Path = "/sys"
) -> NodeChoice:
    """The node that `asked` means: its number, ``auto`` for that of the device, None for any.

    Raises ConfigError for anything else.
    """
    if asked is None:
        return NodeChoice(None)
    if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0:
        return NodeChoice(asked)
    if asked != "auto":
        raise ConfigError(f"numa_node={asked!r}: give the number of a node, 'auto', or None")
    if bus_id is None:
        return NodeChoice(None, "not bound to a node: no device was named to be near to")
    node = device_node(bus_id, sys_root=sys_root)
    if node is None and not _has_one_node(Path(sys_root)):
        return NodeChoice(None, f"not bound to a node: the system does not tell that of {bus_id}")
    return NodeChoice(node)


def bind(address: int, num_bytes: int, choice: NodeChoice) -> NodeChoice:
    """Take pages that are not there yet from the node, or say in a note why that cannot be."""
    if choice.node is None:
        return choice
    try:
        linux_calls.prefer_node(address, num_bytes, choice.node)
    except OSError as bad:
        return NodeChoice(
            None,
            f"not bound to node {choice.node} ({bad.strerror or bad}): is there such a node, and "
            f"has the container CAP_SYS_NICE?",
        )
    return choice


def placement_note(
    address: int, num_bytes: int, node: int, *, proc_root: str | Path = "/proc"
) -> tuple[int | None, str]:
    """How many bytes lie on `node`, None if not told, and a note if that is less than 99 %."""
    found = bytes_by_node(address, address + num_bytes, proc_root=proc_root)
    if found is None:
        return None, ""
    there = found.get(node, 0)
    if there >= _ENOUGH * num_bytes:
        return there, ""
    return there, f"node {node} had room for {format_bytes(there)} of {format_bytes(num_bytes)}"


def _has_one_node(sys_root: Path) -> bool:
    try:
        return (sys_root / "devices/system/node/online").read_text().strip() == "0"
    except OSError:
        return True

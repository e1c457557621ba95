"""How many ranks are on this machine, and so draw on the same host memory."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.ranks.base import Ranks

__all__ = ["machine_number", "ranks_on_machine"]

# A new one with every start of the system, and the same in all containers of a machine.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOT_MINE = (1 << 63) - 1


def ranks_on_machine(ranks: Ranks, *, timeout: float) -> int:
    """How many ranks run on the machine of this one, itself among them: one agreement.

    Raises as `Ranks.agree_min`.
    """
    mine = machine_number()
    table = [_NOT_MINE] * ranks.size
    table[ranks.rank] = mine
    return ranks.agree_min(table, timeout=timeout).count(mine)


def machine_number() -> int:
    """63 bits that other machines do not have."""
    try:
        name = _BOOT_ID.read_text().strip()
    except OSError:
        name = platform.node()
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

"""Enums that every layer of kvferry shares. Nothing here depends on anything."""

from __future__ import annotations

import enum

__all__ = ["Direction", "Layout", "Mover", "SlotKind", "Tier"]


class Direction(enum.StrEnum):
    """Which way a transfer goes. ``h2d`` and ``d2h`` name the copy alone; these name the intent."""

    LOAD = "load"
    """Towards the device."""

    STORE = "store"
    """Away from the device."""


class Layout(enum.StrEnum):
    """The order of dimensions in a pool that holds all layers of a plane, slowest first."""

    LAYER_FIRST = "layer_first"
    """(layer, token, element)."""

    PAGE_MAJOR = "page_major"
    """(page, layer, token, element): each page one contiguous span. kvferry's own on the host."""

    TOKEN_MAJOR = "token_major"
    """(token, layer, element): neighbouring tokens of one layer are not neighbours in memory."""


class Mover(enum.StrEnum):
    """A way to carry out a transfer of a GPU's pool."""

    DIRECT = "direct"
    """Kernels read and write host memory in place."""

    STAGED = "staged"
    """The copy engine crosses the link, and kernels put bytes in place on the device."""


class SlotKind(enum.StrEnum):
    """What one slot of a host pool holds."""

    PAGE = "page"
    """One page of every plane that follows the tokens."""

    STATE = "state"
    """One checkpoint of every plane that exists only at an exact token boundary."""


class Tier(enum.StrEnum):
    """A kind of memory that holds pages, nearest to the computation first."""

    DEVICE = "device"
    """The accelerator's memory, or on the CPU path the engine's own tensors."""

    HOST = "host"
    """Main memory."""

    STORAGE = "storage"
    """Disks and object stores."""

"""What csrc/staged_submit.c and direct_submit.c are handed: the ctypes twins of submit.h."""

from __future__ import annotations

import ctypes
from enum import IntEnum

from kvferry.kernels.transfer_args import TransferArgs

__all__ = [
    "DRIVER_FUNCTIONS",
    "BandArgs",
    "ChunkArgs",
    "DirectArgs",
    "FieldArgs",
    "GroupArgs",
    "LaunchArgs",
    "LaunchesArgs",
    "PieceArgs",
    "RingArgs",
    "RoomArgs",
    "RowTableArgs",
    "StagedArgs",
    "SubmitStep",
    "fields_of",
]

DRIVER_FUNCTIONS = {
    "launch": ("cuLaunchKernel", 4000),
    "record": ("cuEventRecord", 2000),
    "wait": ("cuStreamWaitEvent", 3020),
    "copy_rows": ("cuMemcpy2DAsync", 3020),
}
"""By field: what is called of the driver, in the form of which version; a newer one may take other
arguments."""

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64
_Address = ctypes.c_uint64


class PieceArgs(ctypes.Structure):
    """A `kvferry.transfer.staging.Piece`."""

    _fields_ = (
        ("group", _Int),
        ("first_page", _Int),
        ("num_pages", _Int),
        ("ends_group", _Int),
    )


class BandArgs(ctypes.Structure):
    """A `Band`."""

    _fields_ = (("address", _Address), ("pitch", _Int), ("width", _Int), ("in_staging", _Int))


class LaunchArgs(ctypes.Structure):
    """A kernel for some neighbouring spans: `PreparedLaunch`, and what of it `Launch` says."""

    _fields_ = (
        ("function", _Pointer),
        ("parameters", _Pointer),
        ("blocks", _Int),
        ("threads", _Int),
        ("shared_bytes", _Int),
        ("first_span", _Int),
        ("num_spans", _Int),
        ("page_work", _Int),
        ("depth", _Int),
    )


class GroupArgs(ctypes.Structure):
    """A `Group`: addresses of arrays, and how many are in them."""

    _fields_ = (
        ("pitch", _Int),
        ("bands", _Pointer),
        ("num_bands", _Int),
        ("launches", _Pointer),
        ("num_launches", _Int),
    )


class LaunchesArgs(ctypes.Structure):
    """The kernels of a `Step`: the address of an array, and how many are in it."""

    _fields_ = (("launches", _Pointer), ("num_launches", _Int))


class ChunkArgs(ctypes.Structure):
    """A registration of pinned memory, by its first address and the one behind its last."""

    _fields_ = (("begin", _Address), ("end", _Address))


class RowTableArgs(ctypes.Structure):
    """Where the device rows of a plan begin, and the bytes of one page of them."""

    _fields_ = (("address", _Address), ("page_bytes", _Address))


class RoomArgs(ctypes.Structure):
    """Some bytes of a ring, and the handles of the two events in their life."""

    _fields_ = (
        ("begin", _Address),
        ("end", _Address),
        ("filled", _Pointer),
        ("emptied", _Pointer),
    )


class RingArgs(ctypes.Structure):
    """The state of a `StagingRing`."""

    _fields_ = (
        ("address", _Address),
        ("num_bytes", _Address),
        ("next", _Address),
        ("rooms", _Pointer),
        ("num_rooms", _Int),
        ("oldest", _Int),
        ("num_live", _Int),
    )


_FIELDS = (
    *("rows", "host_slots", "host_base", "page_seeds", "sums", "bad_pages"),
    *("num_pages", "first_page", "first_span", "num_spans", "items_per_span"),
)


class FieldArgs(ctypes.Structure):
    """Where the fields of a `TransferArgs` lie that a launch changes."""

    _fields_ = tuple((name, _Pointer) for name in _FIELDS)


def fields_of(transfer: TransferArgs) -> FieldArgs:
    """Those of `transfer`, which must outlive them."""
    base = ctypes.addressof(transfer)
    return FieldArgs(*(base + getattr(TransferArgs, name).offset for name in _FIELDS))


class StagedArgs(ctypes.Structure):
    """One transfer, and what became of it in ``num_reached`` and the fields after it."""

    _fields_ = (
        ("launch", _Pointer),
        ("record", _Pointer),
        ("wait", _Pointer),
        ("copy_rows", _Pointer),
        ("copy_pieces", _Pointer),
        ("piece_attributes", _Pointer),
        ("piece_first", _Pointer),
        ("piece_failed", _Pointer),
        ("lanes", _Pointer * 2),
        ("copies", _Pointer),
        ("begun", _Pointer),
        ("pieces", _Pointer),
        ("num_pieces", _Int),
        ("groups", _Pointer),
        ("runs", _Pointer),
        ("num_runs", _Int),
        ("host_slots", _Pointer),
        ("chunks", _Pointer),
        ("num_chunks", _Int),
        ("is_load", _Int),
        ("parts_worth_a_call", _Int),
        ("fields", FieldArgs),
        ("row_tables", _Pointer),
        ("num_row_tables", _Int),
        ("page_seeds", _Address),
        ("sums", _Address),
        ("bad_pages", _Address),
        ("ring", _Pointer),
        ("reached", _Pointer),
        ("interval", _Pointer),
        ("part_targets", _Pointer),
        ("part_sources", _Pointer),
        ("part_sizes", _Pointer),
        ("max_parts", _Int),
        ("num_reached", _Int),
        ("interval_begun", _Int),
        ("step", _Int),
        ("detail", _Address),
    )


class DirectArgs(ctypes.Structure):
    """One transfer, and what became of it in ``num_reached`` and the fields after it."""

    _fields_ = (
        ("launch", _Pointer),
        ("record", _Pointer),
        ("stream", _Pointer),
        ("steps", _Pointer),
        ("num_steps", _Int),
        ("num_pages", _Int),
        ("fields", FieldArgs),
        ("reached", _Pointer),
        ("num_reached", _Int),
        ("step", _Int),
        ("detail", _Address),
    )


class SubmitStep(IntEnum):
    """Which call failed: `enum kvferry_step`."""

    NOTHING = 0
    LAUNCH = 1
    RECORD = 2
    WAIT = 3
    COPY_ROWS = 4
    COPY_PIECES = 5
    NOT_PINNED = 6

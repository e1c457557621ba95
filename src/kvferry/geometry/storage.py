"""What a tensor says of its own memory, whichever library made it."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvferry.errors import ViewError

__all__ = ["Storage", "describe_storage"]


@dataclasses.dataclass(frozen=True)
class Storage:
    """A strided tensor and the allocation it lies in. Strides and sizes are bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_size: int
    device: str
    start: int
    num_bytes: int


def describe_storage(tensor: Any, what: str) -> Storage:
    """The memory of a torch tensor or numpy array; ViewError for anything without strides."""
    if hasattr(tensor, "untyped_storage"):
        return _of_torch(tensor, what)
    if hasattr(tensor, "__array_interface__"):
        return _of_numpy(tensor, what)
    raise ViewError(
        f"{what}: {type(tensor).__name__} is neither a torch tensor nor a numpy array; pass one "
        f"of these over the same memory"
    )


def _of_torch(tensor: Any, what: str) -> Storage:
    layout = str(tensor.layout)
    device = str(tensor.device)
    if layout != "torch.strided" or device == "meta":
        raise ViewError(
            f"{what}: layout {layout} on device {device} has no strided memory; use a dense tensor"
        )
    item_size = tensor.element_size()
    storage = tensor.untyped_storage()
    return Storage(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * item_size for stride in tensor.stride()),
        item_size=item_size,
        device=device,
        start=storage.data_ptr(),
        num_bytes=storage.nbytes(),
    )


def _of_numpy(array: Any, what: str) -> Storage:
    if array.dtype.hasobject:
        raise ViewError(f"{what}: dtype {array.dtype} is not plain bytes; pass an array of numbers")
    if array.__array_interface__["data"][1]:
        raise ViewError(f"{what}: the array is read-only; pass one that loads may write to")
    owner = array
    while hasattr(owner.base, "__array_interface__"):
        owner = owner.base
    # A base that is itself a view (over a buffer) still spans what it may touch.
    first = owner.__array_interface__["data"][0]
    spread = [(size - 1) * stride for size, stride in zip(owner.shape, owner.strides, strict=True)]
    low = sum(step for step in spread if step < 0)
    high = sum(step for step in spread if step > 0) + owner.itemsize
    return Storage(
        address=array.__array_interface__["data"][0],
        shape=tuple(array.shape),
        strides=tuple(array.strides),
        item_size=array.itemsize,
        device="cpu",
        start=first + low,
        num_bytes=0 if owner.size == 0 else high - low,
    )

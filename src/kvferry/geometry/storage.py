"""What a tensor says of its own memory, whichever library made it, and whether it still lies there.

Nothing here imports torch: a torch tensor is known by what it can do.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from kvferry.errors import ViewError

__all__ = ["RegisteredStorage", "Storage", "describe_storage"]


@dataclasses.dataclass(frozen=True)
class RegisteredStorage:
    """An allocation as it was when a tensor in it was registered. Sizes are bytes.

    Keeps the allocation alive, whatever becomes of the tensor.
    """

    owner: Any
    """A torch storage, or the numpy array that owns the memory."""

    start: int
    num_bytes: int
    tensor: weakref.ref[Any]
    """What was registered. Holding it would keep alive what is put in the place of its memory."""

    def still_there(self) -> bool:
        """Whether the allocation has its address and size, and the tensor, if any, still uses it.

        False after ``tensor.resize_()``, ``storage.resize_()``, ``tensor.set_()``,
        ``tensor.data = …`` or numpy's ``array.resize(…, refcheck=False)`` moved the memory.
        """
        if not hasattr(self.owner, "data_ptr"):
            return _numpy_extent(self.owner) == (self.start, self.num_bytes)
        tensor = self.tensor()
        storages = [self.owner] if tensor is None else [self.owner, tensor.untyped_storage()]
        return all(
            (storage.data_ptr(), storage.nbytes()) == (self.start, self.num_bytes)
            for storage in storages
        )


@dataclasses.dataclass(frozen=True)
class Storage:
    """A strided tensor and the allocation it lies in. Strides and sizes are bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_size: int
    device: str
    registered: RegisteredStorage

    @property
    def start(self) -> int:
        """The address of the allocation's first byte."""
        return self.registered.start

    @property
    def num_bytes(self) -> int:
        """The bytes of the allocation."""
        return self.registered.num_bytes


def describe_storage(tensor: Any, what: str) -> Storage:
    """The memory of a torch tensor or numpy array.

    Raises ViewError, which calls the tensor `what`, for anything that has no strided memory of its
    own, or whose values are not the bytes in that memory.
    """
    if hasattr(tensor, "untyped_storage"):
        return _of_torch(tensor, what)
    if hasattr(tensor, "__array_interface__"):
        return _of_numpy(tensor, what)
    raise ViewError(
        f"{what}: {type(tensor).__name__} is neither a torch tensor nor a numpy array; pass one "
        f"of these over the same memory"
    )


def _of_torch(tensor: Any, what: str) -> Storage:
    try:
        found = _ask_torch(tensor, what)
    except (RuntimeError, ValueError) as bad:
        if isinstance(bad, ViewError):
            raise
        raise _no_memory(tensor, what) from bad
    # A storage that was given back is empty too, but says so when its bounds are checked.
    if tensor.numel() and found.num_bytes and not found.address:
        raise _no_memory(tensor, what)
    return found


def _ask_torch(tensor: Any, what: str) -> Storage:
    layout, device = "nested" if tensor.is_nested else str(tensor.layout), str(tensor.device)
    if layout != "torch.strided" or device == "meta":
        raise ViewError(
            f"{what}: layout {layout} on device {device} has no strided memory; use a dense tensor"
        )
    for is_lazy, operation in ((tensor.is_conj, "conj"), (tensor.is_neg, "neg")):
        if is_lazy():
            raise ViewError(
                f"{what}: a lazy {operation} view has other values than the bytes in its memory; "
                f"pass the tensor itself, or resolve_{operation}() of it"
            )
    storage, item_size = tensor.untyped_storage(), tensor.element_size()
    # A fake tensor warns when asked for its address, but its storage says what it is.
    if str(storage.device) == "meta":
        raise _no_memory(tensor, what)
    return Storage(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * item_size for stride in tensor.stride()),
        item_size=item_size,
        device=device,
        registered=RegisteredStorage(
            storage, storage.data_ptr(), storage.nbytes(), weakref.ref(tensor)
        ),
    )


def _no_memory(tensor: Any, what: str) -> ViewError:
    return ViewError(
        f"{what}: {type(tensor).__name__} has no memory of its own (it is fake, mapped, traced or "
        f"uninitialised); register the tensor that the engine allocated"
    )


def _of_numpy(array: Any, what: str) -> Storage:
    import numpy as np

    if not isinstance(array, np.ndarray):
        raise ViewError(
            f"{what}: {type(array).__name__} is neither a torch tensor nor a numpy array; pass "
            f"numpy.asarray() of it"
        )
    if isinstance(array, np.ma.MaskedArray):
        raise ViewError(
            f"{what}: a masked array keeps more than its bytes; pass its .data, and see to the "
            f"mask yourself"
        )
    if array.dtype.hasobject:
        raise ViewError(f"{what}: dtype {array.dtype} is not plain bytes; pass an array of numbers")
    if not array.flags.writeable:
        raise ViewError(f"{what}: the array is read-only; pass one that loads may write to")
    owner, base = array, array.base
    while hasattr(base, "__array_interface__"):
        if isinstance(base, np.ndarray):
            owner = base
        base = getattr(base, "base", None)
    return Storage(
        address=array.__array_interface__["data"][0],
        shape=tuple(array.shape),
        strides=tuple(array.strides),
        item_size=array.itemsize,
        device="cpu",
        registered=RegisteredStorage(owner, *_numpy_extent(owner), weakref.ref(array)),
    )


def _numpy_extent(owner: Any) -> tuple[int, int]:
    # An owner that is itself a view (over a buffer) still spans what it may touch.
    first = owner.__array_interface__["data"][0]
    spread = [(size - 1) * stride for size, stride in zip(owner.shape, owner.strides, strict=True)]
    low = sum(step for step in spread if step < 0)
    high = sum(step for step in spread if step > 0) + owner.itemsize
    return first + low, 0 if owner.size == 0 else high - low

"""Pools of an engine with HiCache, wherever the GPU is, and what they should hold after a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

GUARD = 4096
POISON = 0xA5

Rows = npt.NDArray[np.int64]


class Memory:
    """Bytes with a guard of poison on either side, on the host or on the GPU."""

    def __init__(self, num_bytes: int, place: Callable[[int], torch.Tensor], seed: int) -> None:
        self.whole = place(num_bytes + 2 * GUARD)
        self.whole.fill_(POISON)
        self.inside = self.whole[GUARD : GUARD + num_bytes]
        generator = torch.Generator().manual_seed(seed)
        self.inside.copy_(
            torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
        )

    def read(self) -> npt.NDArray[np.uint8]:
        """A copy of all of it, guards too."""
        return np.array(self.whole.cpu().numpy())


class Plane:
    """One plane: L device tensors of packed rows, and a host pool in one of two layouts."""

    def __init__(
        self,
        size: int,
        *,
        layers: int,
        rows: tuple[int, int],
        token_major: bool,
        places: tuple[Callable[[int], torch.Tensor], Callable[[int], torch.Tensor]],
        seed: int,
    ) -> None:
        on_device, on_host = places
        self.size, self.layers, self.token_major = size, layers, token_major
        self.device_rows, self.host_rows = rows
        self.device = [Memory(rows[0] * size, on_device, seed + layer) for layer in range(layers)]
        self.host = Memory(rows[1] * layers * size, on_host, seed + 100)

    @property
    def device_tensors(self) -> list[torch.Tensor]:
        """Shape of each: ``[rows, E]``."""
        return [one.inside.view(self.device_rows, self.size) for one in self.device]

    @property
    def host_tensor(self) -> torch.Tensor:
        """Shape ``[tokens, L, E]`` or ``[L, tokens, E]``."""
        if self.token_major:
            return self.host.inside.view(self.host_rows, self.layers, self.size)
        return self.host.inside.view(self.layers, self.host_rows, self.size)

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        """Of each layer; shape ``[tokens, E]``."""
        whole = self.host_tensor
        return list((whole.transpose(0, 1) if self.token_major else whole).unbind(0))

    @property
    def host_stride(self) -> int:
        """Bytes from a token to the next."""
        return self.size * (self.layers if self.token_major else 1)

    def images(self) -> list[npt.NDArray[np.uint8]]:
        """Copies of all memory: the device's layers, then the host's."""
        return [*(one.read() for one in self.device), self.host.read()]

    def after(
        self, to_device: bool, device_rows: Rows, host_rows: Rows, layers: Sequence[int]
    ) -> list[npt.NDArray[np.uint8]]:
        """What all memory holds after a move: written row by row, the plain way."""
        images = self.images()
        host = images[-1][GUARD:-GUARD]
        for layer in layers:
            device = images[layer][GUARD:-GUARD]
            for here, there in zip(device_rows.tolist(), host_rows.tolist(), strict=True):
                at = there * self.host_stride + layer * (
                    self.size if self.token_major else self.size * self.host_rows
                )
                one, other = device[here * self.size :][: self.size], host[at : at + self.size]
                if to_device:
                    one[:] = other
                else:
                    other[:] = one
        return images

    def check(self, expected: list[npt.NDArray[np.uint8]], what: str) -> None:
        """Fail unless all memory is `expected`, guards too."""
        for number, (found, wanted) in enumerate(zip(self.images(), expected, strict=True)):
            if not np.array_equal(found, wanted):
                first = int(np.flatnonzero(found != wanted)[0]) - GUARD
                where = f"layer {number}" if number < self.layers else "the host"
                raise AssertionError(f"{what}: {where} differs first at byte {first}")


def scattered(seed: int, count: int, num_rows: int, page: int = 1) -> Rows:
    """Different rows in no order, in whole pages."""
    starts = np.random.default_rng(seed).permutation(num_rows // page)[: math.ceil(count / page)]
    rows: Rows = (starts[:, None] * page + np.arange(page)).ravel()[:count]
    return rows


def table(tensors: Sequence[torch.Tensor], to_device: Callable[[torch.Tensor], Any]) -> Any:
    """A table of addresses."""
    addresses = torch.tensor([one.data_ptr() for one in tensors], dtype=torch.uint64)
    return to_device(addresses)

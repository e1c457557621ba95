"""Host pools with the methods that storage backends of the engine call, of random bytes."""

from __future__ import annotations

from typing import Any

import torch

PAGE = 4
NUM_PAGES = 8
LAYERS = 3


class LatentPool:
    """One tensor, token after token; a page is one piece."""

    layout = "page_first"
    page_size = PAGE

    def __init__(self, seed: int = 0, *, width: int = 7, dtype: torch.dtype = torch.uint8) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_PAGES * PAGE, LAYERS, width)
        self.dtype = dtype
        self.layer_num = LAYERS
        whole = torch.randint(0, 256, (*shape[:-1], width * dtype.itemsize), dtype=torch.uint8,
                              generator=generator)  # fmt: skip
        self.kv_buffer = whole.view(dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """As the engine has it."""
        size = PAGE * self.kv_buffer[0].numel() * self.kv_buffer.element_size()
        base = self.kv_buffer.data_ptr()
        starts = indices.tolist()[::PAGE]
        return [base + start // PAGE * size for start in starts], [size] * len(starts)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """As the engine has it."""
        page = self.kv_buffer[index : index + PAGE]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """As the engine has it."""
        return torch.zeros_like(self.kv_buffer[:PAGE]).flatten()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        """As the engine has it."""
        self.kv_buffer[index : index + PAGE] = page.reshape(self.kv_buffer[:PAGE].shape)


class PairPool(LatentPool):
    """K and V of different width, layer by layer: a page is a piece a layer and tensor."""

    layout = "layer_first"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.head_num = 2
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer = torch.zeros(0)
        self.planes = [
            torch.randint(0, 256, (LAYERS, NUM_PAGES * PAGE, width), dtype=torch.uint8,
                          generator=generator)
            for width in (12, 5)
        ]  # fmt: skip

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """As the engine has it."""
        views = [
            plane[layer, start : start + PAGE]
            for start in indices.tolist()[::PAGE]
            for layer in range(LAYERS)
            for plane in self.planes
        ]
        return [view.data_ptr() for view in views], [view.numel() for view in views]


class CopiedPool(LatentPool):
    """A pool that cannot tell where its pages lie."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """As the engine has it for some layouts."""
        raise NotImplementedError("side states")


def indices_of(*pages: int) -> torch.Tensor:
    """All indices of `pages`, as the engine gives them."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def hashes(count: int, seed: int = 0) -> list[str]:
    """Keys as the engine makes them."""
    return [f"{seed * 1000 + number:064x}" for number in range(count)]


def tensors_of(pool: Any) -> list[torch.Tensor]:
    """All memory of a pool."""
    return list(pool.planes) if isinstance(pool, PairPool) else [pool.kv_buffer]

"""A small inference engine: paged KV, continuous batching, and kvferry where it belongs.

Read `Engine` from top to bottom: a request is submitted, admitted, prefilled, decoded and let go,
and each `self.cache.` is a call of kvferry. Without a cache (None) the same engine computes all.

Letters: B sequences, T new tokens, C tokens of context, H heads, D values a head, W words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from kvferry import Geometry, KVFerry, Namespace, Plane, PoolView

BLOCK, PAGE, MAX_RUNNING = 16, 64, 8
Wait = Callable[[int], None]


class Shape(NamedTuple):
    """Of a model: small enough for a test, unless told otherwise."""

    layers: int = 3
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    words: int = 211
    dtype: torch.dtype = torch.float32


class Model:
    """A Llama-like decoder. Weights are random, with a deviation of 1 / sqrt(inputs)."""

    def __init__(self, shape: Shape, device: str = "cpu", seed: int = 0) -> None:
        self.shape, self.device = shape, device
        given: Any = {"generator": torch.Generator(device).manual_seed(seed), "device": device}

        def weight(*size: int) -> Any:
            return (torch.randn(size, **given) / size[-2] ** 0.5).to(shape.dtype)

        layers, width, heads = shape.layers, shape.width, shape.heads + 2 * shape.kv_heads
        self.from_words = weight(shape.words, 1, width)[:, 0]
        self.to_words: Tensor = weight(width, shape.words)
        self.to_qkv = weight(layers, width, heads * shape.dim)
        self.to_output = weight(layers, shape.heads * shape.dim, width)
        self.to_hidden = weight(layers, width, 6 * width)
        self.from_hidden = weight(layers, 3 * width, width)
        self.frequencies = 10_000 ** -(torch.arange(0, shape.dim, 2, device=device) / shape.dim)

    def new_pool(self, num_blocks: int) -> Tensor:
        """A KV pool ``[layers, slots, 2, H, D]``; block b has the BLOCK slots from b * BLOCK on."""
        size = (self.shape.layers, num_blocks * BLOCK, 2, self.shape.kv_heads, self.shape.dim)
        return torch.zeros(size, dtype=self.shape.dtype, device=self.device)

    def forward(
        self, pool: Tensor, tokens: Tensor, start: Tensor, slots: Tensor, *wait_layer: Wait
    ) -> Tensor:
        """The likeliest next tokens, ``[B]``, after `tokens` ``[B, T]``, the first at `start` [B].

        `slots` ``[B, C]`` has the slot of each position, and anything behind a sequence's end.
        New KV goes into `pool`; `wait_layer` is called before a layer reads what came before.
        """
        shape = self.shape
        positions = start[:, None] + torch.arange(tokens.shape[1], device=self.device)
        angles = (positions[..., None] * self.frequencies)[:, :, None]
        turns = angles.cos().to(shape.dtype), angles.sin().to(shape.dtype)
        seen = torch.arange(slots.shape[1], device=self.device) <= positions[:, None, :, None]
        new_slots, groups = slots.gather(1, positions), shape.heads // shape.kv_heads
        x = self.from_words[tokens]
        for layer in range(shape.layers):
            qkv = rms_norm(x, (shape.width,)) @ self.to_qkv[layer]
            heads = qkv.reshape(*tokens.shape, -1, shape.dim)
            q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], 2)
            pool[layer, new_slots] = torch.stack((rotate(k, turns), v), 2)
            for wait in wait_layer:
                wait(layer)
            keys, values = pool[layer, slots].repeat_interleave(groups, 3).permute(2, 0, 3, 1, 4)
            q = rotate(q, turns).transpose(1, 2)
            mixed = scaled_dot_product_attention(q, keys, values, attn_mask=seen)
            x = x + mixed.transpose(1, 2).flatten(2) @ self.to_output[layer]
            gate, up = (rms_norm(x, (shape.width,)) @ self.to_hidden[layer]).chunk(2, -1)
            x = x + (silu(gate) * up) @ self.from_hidden[layer]
        return (rms_norm(x[:, -1], (shape.width,)) @ self.to_words).argmax(-1)


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of ``[B, T, H, D]``."""
    (left, right), (cos, sin) = x.chunk(2, -1), turns
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


def open_cache(pool: Tensor, **sections: Any) -> KVFerry:
    """A cache for a pool ``[layers, slots, 2, H, D]``: one plane, K and V of a token together."""
    size = pool[0, 0].numel() * pool.element_size()
    plane = Plane(name="kv", num_layers=len(pool), element_size=size)
    geometry = Geometry(planes=(plane,), page_size=PAGE)
    name = {"model": "toy", "revision": "seed 0", "dtype": str(pool.dtype)}
    namespace = Namespace(**name, geometry=geometry.fingerprint)
    view = PoolView.from_tensors(geometry, {"kv": pool})
    return KVFerry(geometry, view, namespace=namespace, **sections)


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, and what became of it."""

    prompt: list[int]
    max_new: int
    output: list[int] = dataclasses.field(default_factory=list)
    hits: int = 0  # leading tokens that were loaded, verified, and not computed
    blocks: list[int] = dataclasses.field(default_factory=list)
    fetch: Any = None
    load: Any = None
    stores: list[Any] = dataclasses.field(default_factory=list)

    def slots(self, num_tokens: int) -> Any:
        """Token slots of the first `num_tokens` positions."""
        return (np.array(self.blocks)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[:num_tokens]

    def filled(self) -> dict[str, Any]:
        """For `store`: the tokens that have KV, which the last one has not, and where."""
        tokens = [*self.prompt, *self.output[:-1]]
        return {"tokens": tokens, "device_slots": self.slots(len(tokens))}


class Engine:
    """Decodes sequences together. A prompt is computed in parts, to each multiple of `chunk`."""

    def __init__(
        self, model: Model, pool: Tensor, cache: KVFerry | None = None, *, chunk: int = PAGE
    ) -> None:
        self.model, self.pool, self.cache, self.chunk = model, pool, cache, chunk
        self.free = list(range(pool.shape[1] // BLOCK))
        self.waiting, self.running, self.leaving = (list[Request]() for _ in range(3))

    def submit(self, prompt: list[int], max_new: int) -> Request:
        """Take a request on; `step` works on it."""
        request = Request(prompt, max_new)
        if len(prompt) + max_new > self.pool.shape[1]:
            raise ValueError(f"{len(prompt)} + {max_new} tokens, and {self.pool.shape[1]} slots")
        if self.cache:  # while it waits for its turn, storage brings what it has
            request.fetch = self.cache.prefetch(prompt[:-1])
        self.waiting.append(request)
        return request

    @torch.inference_mode()
    def step(self) -> None:
        """One turn: who fits comes in, everybody gets a token, who is finished goes."""
        if self.cache:
            self.cache.poll()
        for request in [one for one in self.leaving if all(each.done for each in one.stores)]:
            self.leaving.remove(request)
            self.free += request.blocks  # nothing reads them any more
        before = len(self.running)
        while self._admit():
            pass  # all loads have begun before the first is computed with
        for request in self.running[before:]:
            self._prefill(request)
        if self.running:
            self._decode([one for one in self.running if len(one.output) < one.max_new])
            self._leave()
        elif self.cache and (self.waiting or self.leaving):
            self.cache.wait(0.01)  # nothing to compute: for storage, or for blocks

    def run(self) -> None:
        """Until every request is finished, and every block is free."""
        while self.waiting or self.running or self.leaving:
            self.step()

    def _admit(self) -> bool:
        """Begin with the next request, if there is room: match, and begin to load."""
        if not self.waiting or len(self.running) == MAX_RUNNING:
            return False
        request = self.waiting[0]
        num_blocks = -(-(len(request.prompt) + request.max_new) // BLOCK)
        if num_blocks > len(self.free) or (request.fetch and request.fetch.look() is None):
            return False  # no room, or storage still brings pages
        self.running.append(self.waiting.pop(0))
        request.blocks = [self.free.pop() for _ in range(num_blocks)]
        if self.cache:
            with self.cache.match(request.prompt[:-1]) as found:  # the last token is computed
                if count := found.num_tokens:
                    request.load = self.cache.load(found, device_slots=request.slots(count))
        return True

    def _prefill(self, request: Request) -> None:
        """Compute what was not found while the rest arrives, verify, emit, store."""
        if load := request.load:
            token = self._compute(request, load.num_tokens, load.wait_layer)
            load.wait()
            request.hits = load.usable_tokens
            if request.hits < load.num_tokens:  # a page was bad: what came of it is void
                token = self._compute(request, request.hits)
        else:
            token = self._compute(request, 0)
        request.output.append(int(token))
        if self.cache:
            request.stores.append(self.cache.store(**request.filled()))

    def _compute(self, request: Request, start: int, *wait_layer: Wait) -> Tensor:
        """The token after the prompt, of which the KV of the first `start` tokens is there."""
        tokens, slots = map(self._tensor, ([request.prompt], request.slots(len(request.prompt))))
        token = tokens[:, 0]
        while start < len(request.prompt):
            end = min(start - start % self.chunk + self.chunk, len(request.prompt))
            given = tokens[:, start:end], self._tensor([start]), slots[None, :end]
            token = self.model.forward(self.pool, *given, *wait_layer)
            start, wait_layer = end, ()  # what was waited for is there
        return token

    def _decode(self, running: list[Request]) -> None:
        """A token more for everybody who runs."""
        counts = [len(one.prompt) + len(one.output) for one in running]
        slots = np.zeros((len(counts), max(counts, default=0)), np.int64)
        for row, count, request in zip(slots, counts, running, strict=True):
            row[:count] = request.slots(count)
        if running:
            given = [one.output[-1:] for one in running], [count - 1 for count in counts], slots
            tokens, start, where = map(self._tensor, given)
            new = self.model.forward(self.pool, tokens, start, where)
            for request, token in zip(running, new.tolist(), strict=True):
                request.output.append(token)

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values, device=self.pool.device)

    def _leave(self) -> None:
        """Who is finished goes; what is not on the host yet is copied there."""
        for request in [one for one in self.running if len(one.output) == one.max_new]:
            self.running.remove(request)
            self.leaving.append(request)
            if self.cache:
                request.stores.append(self.cache.evicting(**request.filled()))


if __name__ == "__main__":
    model = Model(Shape())
    with open_cache(pool := model.new_pool(256), host={"num_bytes": "16MiB"}) as cache:
        engine = Engine(model, pool, cache)
        for _ in range(2):
            asked = [engine.submit([*range(200), number, 5], max_new=8) for number in range(8)]
            engine.run()
            print(sum(one.hits for one in asked), "of", 8 * 202, "tokens were loaded")

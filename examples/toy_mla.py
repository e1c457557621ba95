"""A toy decoder with multi-head latent attention, whose prefix kvferry carries away and back.

Its cache is what engines with fp8 MLA keep: a paged pool of bytes, one element a token and layer,

    576 bytes = latent 512 × fp8 | rotary 64 × fp8
    656 bytes = latent 512 × fp8 | 4 scales × fp32 | rotary 64 × bf16

Letters: L layers, T tokens, H heads, V words. Run it alone: python examples/toy_mla.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import rms_norm

import kvferry
from kvferry.memory import SlotOwner

ELEMENT_SIZES = (576, 656)
LAYERS, HEADS, WIDTH, WORDS, LATENT, ROPE, GROUP = 3, 4, 128, 199, 512, 64, 128
BLOCK, NUM_BLOCKS, PAGE, PAGES, STEPS = 16, 32, 64, 3, 12
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0


class Outcome(NamedTuple):
    """What became of one prefix."""

    element_size: int
    num_bytes: int
    same_logits: bool
    """The logits of every step, bit for bit, against the run that was never evicted."""
    control_differs: bool
    """With one byte of one loaded element changed the logits differ: the comparison can fail."""
    verified_pages: int
    """What a load vouched for after one bit of page 1 was flipped on the host."""


class ToyMLA:
    """Random weights, greedy decoding. Shape of the pool: ``[L, blocks, BLOCK, element]`` bytes."""

    def __init__(self, element_size: int) -> None:
        torch.manual_seed(0)
        self.scaled = element_size == 656
        self.pool = torch.zeros(LAYERS, NUM_BLOCKS, BLOCK, element_size, dtype=torch.uint8)
        self.words = torch.randn(WORDS, WIDTH)
        self.to_cache = torch.randn(LAYERS, WIDTH, LATENT + ROPE) / WIDTH**0.5
        self.to_query = torch.randn(LAYERS, WIDTH, HEADS * (LATENT + ROPE)) / WIDTH**0.5
        self.to_output = torch.randn(LAYERS, HEADS * LATENT, WIDTH) / (HEADS * LATENT) ** 0.5

    def pack(self, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """``[T, LATENT]`` and ``[T, ROPE]`` in float32 as the bytes of T elements."""
        if not self.scaled:
            return torch.cat([latent, rope], -1).to(FP8).view(torch.uint8)
        groups = latent.reshape(-1, LATENT // GROUP, GROUP)
        scales = groups.abs().amax(-1) / FP8_MAX
        small = (groups / scales[..., None]).reshape(-1, LATENT).to(FP8)
        return torch.cat([part.view(torch.uint8) for part in (small, scales, rope.bfloat16())], -1)

    def unpack(self, elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse of `pack`, but for rounding."""
        latent = elements[:, :LATENT].view(FP8).float()
        if not self.scaled:
            return latent, elements[:, LATENT:].view(FP8).float()
        scales = elements[:, LATENT : LATENT + 16].contiguous().view(torch.float32)
        groups = latent.reshape(-1, LATENT // GROUP, GROUP) * scales[..., None]
        rope = elements[:, LATENT + 16 :].contiguous().view(torch.bfloat16).float()
        return groups.reshape(-1, LATENT), rope

    def forward(self, tokens: torch.Tensor, start: int, slots: torch.Tensor) -> torch.Tensor:
        """Logits ``[T, V]`` of tokens ``[start, start + T)``; `slots` has each position's slot."""
        positions = torch.arange(start + len(tokens))
        is_later = positions[None] > positions[start:, None]
        x = self.words[tokens]
        for layer in range(LAYERS):
            normed, pool = rms_norm(x, (WIDTH,)), self.pool[layer].flatten(0, 1)
            latent, rope = torch.split(normed @ self.to_cache[layer], [LATENT, ROPE], -1)
            pool[slots[positions[start:]]] = self.pack(latent, rotate(rope, positions[start:]))
            latents, ropes = self.unpack(pool[slots[positions]])
            queries = (normed @ self.to_query[layer]).reshape(-1, HEADS, LATENT + ROPE)
            on_latent, on_rope = torch.split(queries.transpose(0, 1), [LATENT, ROPE], -1)
            scores = on_latent @ latents.T + rotate(on_rope, positions[start:]) @ ropes.T
            scores = (scores / (LATENT + ROPE) ** 0.5).masked_fill(is_later, -torch.inf)
            heads = (scores.softmax(-1) @ latents).transpose(0, 1).flatten(1)
            x = x + heads @ self.to_output[layer]
        return torch.as_tensor(rms_norm(x, (WIDTH,)) @ self.words.T)

    def decode(self, tokens: torch.Tensor, start: int, slots: torch.Tensor) -> torch.Tensor:
        """Greedy decoding after `tokens`; the logits of every step, ``[STEPS, V]``."""
        steps: list[torch.Tensor] = []
        for _ in range(STEPS):
            steps.append(self.forward(tokens, start, slots)[-1])
            start, tokens = start + len(tokens), steps[-1].argmax().reshape(1)
        return torch.stack(steps)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the last dimension of ``[..., T, ROPE]``."""
    angles = positions[:, None] / 10_000 ** (torch.arange(0, ROPE, 2) / ROPE)
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], ROPE // 2, 2))
    return torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@torch.inference_mode()
def carry(element_size: int) -> Outcome:
    """Prefill a prefix, store it, poison the pool, load it into other blocks, and decode on."""
    model = ToyMLA(element_size)
    before, after = (
        torch.as_tensor(kvferry.blocks_to_rows(blocks, block_size=BLOCK, page_size=PAGE))
        for blocks in torch.randperm(NUM_BLOCKS).chunk(2)
    )
    prefix, question = torch.randint(WORDS, (PAGES * PAGE + 5,)).tensor_split([PAGES * PAGE])
    plane = kvferry.Plane(name="latent", num_layers=LAYERS, element_size=element_size)
    geometry = kvferry.Geometry(planes=(plane,), page_size=PAGE)
    device = kvferry.PoolView.from_tensors(geometry, {"latent": model.pool}, slot_dims=(0, 1))
    with kvferry.HostPool(geometry, num_slots=8) as host:
        engine = kvferry.TransferEngine(device, host)
        runs = host.allocate(PAGES, SlotOwner.INDEX) or ()
        slots = [slot for run in runs for slot in run.slots]

        def plan(direction: kvferry.Direction, pages: torch.Tensor) -> kvferry.TransferPlan:
            where: dict[str, Any] = {"host_slots": slots, "device_slots": pages[:PAGES]}
            return kvferry.TransferPlan.build(geometry, direction, **where)

        def load() -> int:
            handle = engine.load(plan(kvferry.Direction.LOAD, after))
            handle.wait()
            return handle.verified_pages

        model.forward(prefix, 0, before.flatten())
        stored = engine.store(plan(kvferry.Direction.STORE, before))
        stored.wait()
        never_evicted = model.decode(question, len(prefix), before.flatten())

        model.pool.fill_(0xA5)
        is_whole = load() == PAGES
        restored = model.decode(question, len(prefix), after.flatten())
        same = is_whole and torch.equal(restored, never_evicted)

        model.pool[1].flatten(0, 1)[after[1, 7], 3] ^= 0x40
        changed = model.decode(question, len(prefix), after.flatten())
        host.slot_view(slots[1])[element_size] ^= 1
        differs = not torch.equal(changed, restored)
        return Outcome(element_size, stored.plan.num_bytes, same, differs, load())


if __name__ == "__main__":
    for size in ELEMENT_SIZES:
        print(carry(size))

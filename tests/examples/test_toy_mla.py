"""The toy MLA decoder: its cache format, and its prefix away and back."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import toy_mla

_SIZES = pytest.mark.parametrize("element_size", toy_mla.ELEMENT_SIZES)


@_SIZES
def test_a_prefix_comes_back_into_other_blocks(element_size: int) -> None:
    """Logits equal the never-evicted run; a changed byte alters them; a flipped bit is refused."""
    outcome = toy_mla.carry(element_size)
    tokens = toy_mla.PAGES * toy_mla.PAGE
    assert outcome == (element_size, tokens * toy_mla.LAYERS * element_size, True, True, 1)


@_SIZES
def test_an_element_has_the_size_it_says(element_size: int) -> None:
    """What is packed fills the element and comes out again within fp8's rounding."""
    model = toy_mla.ToyMLA(element_size)
    latent, rope = torch.randn(7, toy_mla.LATENT), torch.randn(7, toy_mla.ROPE)
    elements = model.pack(latent, rope)
    assert (elements.shape, elements.dtype) == ((7, element_size), torch.uint8)
    for found, expected in zip(model.unpack(elements), (latent, rope), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.07, atol=0.02)


@_SIZES
def test_a_split_computes_what_one_pass_computes(element_size: int) -> None:
    """The decoder reads its cache: a prompt in two parts gives the logits of one pass."""
    tokens, slots = torch.randint(toy_mla.WORDS, (40,)), torch.randperm(64)
    with torch.inference_mode():
        whole = toy_mla.ToyMLA(element_size).forward(tokens, 0, slots)
        model = toy_mla.ToyMLA(element_size)
        model.forward(tokens[:33], 0, slots)
        rest = model.forward(tokens[33:], 33, slots)
    torch.testing.assert_close(rest, whole[33:], rtol=1e-2, atol=1e-2)


def test_the_example_stays_short() -> None:
    """A reader takes it in at once: 150 lines at most."""
    assert len(Path(toy_mla.__file__).read_text().splitlines()) <= 150

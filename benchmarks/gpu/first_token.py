"""How long a transformers user waits for the first token of a long prompt, with `PrefixCache`.

    python3 benchmarks/gpu/first_token.py --json benchmarks/results/first_token.json
    python3 benchmarks/gpu/first_token.py --tiny

Two models with random weights, std = 1/√fan_in, in bfloat16: one of the shape of Llama 3.1 8B
(GQA), and one with the attention of DeepSeek V2 Lite (MLA) whose layers are all dense, as wide as
what a token uses of its experts. The prompt is of 16k tokens and two more, and nothing runs beside
it.

    computed       by `generate` of transformers, split where `PrefixCache` splits
    kept           the same by `PrefixCache` with nothing to find: it stores before the first token
    from the host  by `PrefixCache`, all whole pages from host memory
    from files     the same with an empty host tier; what the system caches of the files is
                   dropped before, and `in memory` is the share of files that it kept all the same

`PrefixCache` is used by hand, in the steps of its `generate`, so that hits are counted each time.
Seconds are those of a caller, up to the first token in host memory: the median of the rounds. Every
page is verified. Tokens and logits of every call must equal those of `computed`, to the bit, and
another prompt's must not, or no figure is told.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import rig

if TYPE_CHECKING:
    import torch

    from kvferry.adapters.transformers import PrefixCache

_PLENTY_SECS = 120.0
_ROOM_PAGES = 16
_REST = 2
_NEW = 4

_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "8B-shaped GQA": (
        "Llama",
        {
            "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 131072, "tie_word_embeddings": False,
        },
    ),
    "MLA-shaped": (
        "DeepseekV3",
        {
            "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
            "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
            "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 27,
            "max_position_embeddings": 163840, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
_TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
_TINY_HEADS = {
    "Llama": {"num_key_value_heads": 2},
    "DeepseekV3": {
        "num_key_value_heads": 4, "kv_lora_rank": 40, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 24, "first_k_dense_replace": 2,
    },
}  # fmt: skip


class Answer(NamedTuple):
    """What one call gave."""

    seconds: float
    """Up to the first token."""

    tokens: torch.Tensor
    logits: torch.Tensor
    """Shape ``[new tokens, words]``."""

    hits: int
    """Tokens that were not computed."""


class _Watch:
    """A streamer: it is handed the prompt, and then each token, in host memory."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A token is there."""
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """No more will come."""


def main() -> int:
    """Print the figures; with --json write them as well."""
    parser = arguments()
    args = parser.parse_args()
    if args.json is not None and args.tiny:
        parser.error("--tiny is for trying the script; its figures are not written")
    import torch

    # Answers are compared to the bit, so that equal calls must round alike. It is read by cuBLAS.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    link = {} if args.tiny else rig.begin()
    rows = []
    for row in rows_of_all(args, "cpu" if args.tiny else rig.DEVICE):
        rows.append(row)
        print(line_of(row), flush=True)
    rig.write(args.json, link, rows)
    return 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = rig.parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=int, help="of the prefix; 16384, or 256 with --tiny")
    add("--rounds", type=int, default=3)
    add("--folder", type=pathlib.Path, help="where files go; the system's folder for such, else")
    add("--tiny", action="store_true", help="small shapes on the CPU, to try the script")
    return parser


def line_of(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    more = [f"{name.replace('_', ' ')} {row[name]}" for name in row if name not in ("case", "what")]
    return "  ".join([f"{row['case']:14}", f"{row['what']:14}", *more])


def rows_of_all(args: argparse.Namespace, device: str) -> Iterator[dict[str, Any]]:
    """All figures of both models, one after the other in the same memory."""
    import torch

    for case in _SHAPES:
        yield from Measured(case, args, device).rows()
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()


def share_in_memory(folder: pathlib.Path) -> float | None:
    """Drop what the system caches of the files below; the share of files it kept. None: unknown."""
    kept = number = 0
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb", buffering=0) as opened:
            descriptor = opened.fileno()
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                kept += os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
            except BlockingIOError:
                pass  # it would have to be read from the disk
            except OSError:
                return None  # this file system does not tell
            number += 1
    return kept / number if number else None


class Measured:
    """One model, with and without its prefixes."""

    def __init__(self, case: str, args: argparse.Namespace, device: str) -> None:
        import torch

        self.case, self.args, self.device = case, args, device
        kind, sizes = _SHAPES[case]
        if args.tiny:
            sizes = {**sizes, **_TINY, **_TINY_HEADS[kind]}
        self.model = _model(kind, sizes, device)
        self.words = sizes["vocab_size"]
        self.page_size = 16 if args.tiny else rig.PAGE_SIZE
        asked = args.tokens or (256 if args.tiny else 16384)
        self.prefix = asked // self.page_size * self.page_size
        self.generator = torch.Generator().manual_seed(1)
        heads = sizes["num_attention_heads"]
        # What transformers keeps of a latent depends on its version: this is the most.
        width = (
            heads * (sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"] + sizes["v_head_dim"])
            if kind == "DeepseekV3"
            else 2 * sizes["num_key_value_heads"] * (sizes["hidden_size"] // heads)
        )
        self.token_bytes = sizes["num_hidden_layers"] * width * 2

    def rows(self) -> Iterator[dict[str, Any]]:
        """The four ways."""
        from kvferry.adapters.transformers import PrefixCache

        prompt = self._prompt()
        self._computed(self._prompt())  # warms up
        expected = self._computed(prompt)
        yield self._row("computed", expected, 0, lambda: self._computed(prompt))
        prefetch = {"policy": "wait_complete", "max_secs": _PLENTY_SECS, "threshold_tokens": 1,
                    "budget_pages": self.prefix // self.page_size + 1}  # fmt: skip
        num_pages = self.prefix // self.page_size + _ROOM_PAGES
        num_bytes = int(num_pages * self.page_size * self.token_bytes * 1.02) + (1 << 20)
        with PrefixCache(
            self.model, "random@1", page_size=self.page_size, max_tokens=self.prefix,
            host={"num_bytes": num_bytes}, prefetch=prefetch,
        ) as prefixes:  # fmt: skip
            yield from self._with(prefixes, prompt, expected)

    def _with(
        self, prefixes: PrefixCache, prompt: torch.Tensor, expected: Answer
    ) -> Iterator[dict[str, Any]]:
        ferry = prefixes.ferry
        other = self.kept(prefixes, self._prompt())
        assert not _equal(other, expected), "answers do not depend on the prompt"

        def after(prepare: Callable[[], object]) -> Callable[[], Answer]:
            def made() -> Answer:
                prepare()
                return self.kept(prefixes, prompt)

            return made

        yield self._row("kept", expected, 0, after(ferry.reset))
        yield self._row("from the host", expected, self.prefix, after(lambda: None))
        if importlib.util.find_spec("xxhash") is None:
            reason = "xxhash is not installed, and storage checks every page by it"
            yield {"case": self.case, "what": "from files", "skipped": reason}
            return
        with tempfile.TemporaryDirectory(dir=self.args.folder, prefix="kvferry-") as folder:
            room = 2 * self.prefix * self.token_bytes + (64 << 20)
            ferry.attach_storage("file", path=folder, capacity_bytes=room)
            with contextlib.ExitStack() as attached:
                attached.callback(ferry.detach_storage)
                report = ferry.flush(_PLENTY_SECS)
                assert report.complete, report
                shares: list[float | None] = []

                def empty() -> None:
                    ferry.reset()
                    shares.append(share_in_memory(pathlib.Path(folder)))

                row = self._row("from files", expected, self.prefix, after(empty))
            told = [share for share in shares if share is not None]
            row["in_memory"] = max(told) if len(told) == len(shares) else "unknown"
            yield row

    def _row(
        self, what: str, expected: Answer, hits: int, call: Callable[[], Answer]
    ) -> dict[str, Any]:
        seconds = []
        for turn in range(self.args.rounds + 1):
            found = call()
            assert found.hits == hits, f"{self.case}, {what}: {found.hits} tokens, not {hits}"
            assert _equal(found, expected), f"{self.case}, {what}: another answer"
            if turn:  # the first warms up
                seconds.append(found.seconds)
        return {
            "case": self.case, "what": what, "tokens": self.prefix + _REST, "hit_tokens": hits,
            "ms": round(statistics.median(seconds) * 1e3, 2),
            "least_ms": round(min(seconds) * 1e3, 2), "most_ms": round(max(seconds) * 1e3, 2),
        }  # fmt: skip

    def _prompt(self) -> torch.Tensor:
        import torch

        shape = (1, self.prefix + _REST)
        return torch.randint(1, self.words, shape, generator=self.generator).to(self.device)

    def _computed(self, prompt: torch.Tensor) -> Answer:
        import torch
        from transformers import DynamicCache

        from kvferry.adapters.transformers import cache_keyword

        began = time.perf_counter()
        cache = DynamicCache(config=self.model.config)
        given = {cache_keyword(self.model): cache, "use_cache": True}
        with torch.no_grad():
            self.model(prompt[:, : self.prefix], logits_to_keep=1, **given)
        return self._answer(began, prompt, cache, 0)

    def kept(self, prefixes: PrefixCache, prompt: torch.Tensor) -> Answer:
        """By the steps of `PrefixCache.generate`."""
        began = time.perf_counter()
        cache, hits = prefixes.restore(prompt)
        cache = prefixes.prefill(prompt[:, :-1], cache).cache
        return self._answer(began, prompt, cache, hits)

    def _answer(self, began: float, prompt: torch.Tensor, cache: Any, hits: int) -> Answer:
        import torch

        from kvferry.adapters.transformers import cache_keyword

        watch = _Watch()
        told = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), **{cache_keyword(self.model): cache},
            max_new_tokens=_NEW, min_new_tokens=_NEW, do_sample=False, streamer=watch,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        # The first that it is handed is the prompt.
        seconds = watch.times[1] - began
        return Answer(seconds, told.sequences.cpu(), torch.cat(told.logits).cpu(), hits)


def _equal(found: Answer, expected: Answer) -> bool:
    import torch

    return torch.equal(found.tokens[:, -_NEW:], expected.tokens[:, -_NEW:]) and torch.equal(
        found.logits, expected.logits
    )


def _model(kind: str, sizes: dict[str, Any], device: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = getattr(transformers, f"{kind}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=1.0 if "embed" in name else weight.shape[-1] ** -0.5)
    model.generation_config.pad_token_id = 0
    return model.eval()


if __name__ == "__main__":
    sys.exit(main())

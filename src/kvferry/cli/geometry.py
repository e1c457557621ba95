"""``kvferry geometry``: the planes of a model, and what a token, a page and a slot cost."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.cli.geometry_options import add_geometry_options, read_geometry
from kvferry.cli.json_text import json_text

__all__ = ["add_parser", "run"]

_WIDTH = 100

_EXPLAINED = """\
kv dtypes, in upper or lower case:
  auto            what quantization_config says of the cache, or the model's own dtype
  bf16 fp16 fp32  as they are; also bfloat16, float16, half, float32, float
  fp8_e4m3        1 byte a value; in latent rows with an indexer (DSA): fp8_ds_mla
                  also fp8, fp8_e4m3fn, float8_e4m3fn
  fp8_e5m2        1 byte a value; also float8_e5m2
  fp8_per_tensor  1 byte a value, in every plane
  fp8_ds_mla      latent rows of fp8 with their own fp32 scales and a 16-bit rope part: 656 bytes
  nvfp4           4 bits a value, and a plane with a scale byte for 16 values
  mxfp8           1 byte a value, and a plane with a scale byte for 32 values

examples:
  kvferry geometry config.json --tp 8 --kv-dtype fp8_e4m3 --page-size 64
  kvferry geometry ./model-folder --json
  kvferry geometry config.json --override head_dim=128 --override 'torch_dtype="bfloat16"'
  kvferry geometry planes.json      # {"planes": [{"name": "k", "num_layers": 32,
                                    #              "element_size": 2048}, ...]}
"""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add this command's arguments to the ``kvferry`` parser."""
    parser = subparsers.add_parser(
        "geometry",
        help="show what a model caches",
        description="Show the planes that one rank of a model caches, and what they cost.",
        epilog=_EXPLAINED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_geometry_options(parser, kv_dtypes="the names are below")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the geometry of ``args.config``."""
    geometry, assumed = read_geometry(args)
    described = _described(geometry, assumed)
    if args.json:
        print(json_text(described))
    else:
        print("\n".join(_table(described)))
    return 0


def _described(geometry: Any, assumed: list[str]) -> dict[str, Any]:
    from kvferry.types import SlotKind

    return {
        **geometry.to_dict(),
        "bytes_per_token": geometry.bytes_per_token,
        "page_bytes": geometry.page_bytes,
        "slot_bytes": geometry.slot_bytes(),
        "state_bytes": geometry.state_bytes,
        "state_slot_bytes": geometry.slot_bytes(SlotKind.STATE),
        "fingerprint": geometry.fingerprint,
        "assumed": assumed,
    }


def _table(described: Mapping[str, Any]) -> Sequence[str]:
    header = ("plane", "layers", "bytes a row", "rows a page", "bytes", "a hit needs")
    rows = [header]
    for plane in described["planes"]:
        is_state = plane["hit_rule"] == "exact_boundary"
        num_rows = plane["rows_per_page"] or described["page_size"]
        num_bytes = plane["num_layers"] * plane["element_size"] * num_rows
        rows.append(
            (
                plane["name"],
                f"{plane['num_layers']:,}",
                f"{plane['element_size']:,}",
                "a checkpoint" if is_state else f"{num_rows:,}",
                f"{num_bytes:,}",
                _needs(plane),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    # Names on the left, numbers on the right of their columns.
    lines = [
        "  ".join(
            cell.ljust(width) if column in (0, len(header) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(len(line) for line in lines))
    totals = [("a token", f"{described['bytes_per_token']:,} bytes")]
    if described["page_bytes"]:
        page, slot = described["page_bytes"], described["slot_bytes"]
        text = f"{page:,} bytes in {described['page_size']:,} tokens, in a slot of {slot:,}"
        totals.append(("a page", text))
    if described["state_bytes"]:
        state, slot = described["state_bytes"], described["state_slot_bytes"]
        totals.append(("a checkpoint", f"{state:,} bytes, in a slot of {slot:,}"))
    totals.append(("fingerprint", described["fingerprint"]))
    for number, text in enumerate(described["assumed"]):
        first, *more = textwrap.wrap(text, _WIDTH - 14)
        totals += [("" if number else "assumed", first), *(("", line) for line in more)]
    return [*lines, "", *(f"{name:<13} {text}" for name, text in totals)]


def _needs(plane: Mapping[str, Any]) -> str:
    if plane["hit_rule"] == "last_tokens":
        return f"the last {plane['last_tokens']:,} tokens"
    return {"all_pages": "every page", "exact_boundary": "the exact boundary"}[plane["hit_rule"]]

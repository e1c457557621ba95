"""``kvferry geometry``: the planes of a model, and what a token, a page and a slot cost."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.cli.json_text import json_text
from kvferry.errors import GeometryError

__all__ = ["add_parser", "run"]

# What --json adds to a geometry. It follows from the planes, so it is passed over when the output
# of one run is the input of another.
_DERIVED = (
    *("bytes_per_token", "page_bytes", "slot_bytes", "state_bytes", "state_slot_bytes"),
    *("fingerprint", "assumed"),
)
_WIDTH = 100
_OF_A_MODEL = ("tp", "tp_rank", "pp", "pp_rank", "kv_dtype", "draft_layers", "override")

_EXPLAINED = """\
kv dtypes (other spellings: bfloat16, float16, half, float32, float, fp8, fp8_e4m3fn, float8_...):
  auto            what quantization_config says of the cache, or the model's own dtype
  bf16 fp16 fp32  as they are
  fp8_e4m3        1 byte a value; in latent rows with an indexer (DSA): fp8_ds_mla
  fp8_e5m2        1 byte a value
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
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a Hugging Face config.json, the folder that holds it, or a JSON file with planes",
    )
    # Defaults stand in the library. None here tells an option that was not given.
    parser.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks (1)")
    parser.add_argument("--tp-rank", type=int, metavar="R", help="this rank (0)")
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline stages (1)")
    parser.add_argument("--pp-rank", type=int, metavar="R", help="this stage (0)")
    parser.add_argument(
        "--kv-dtype", metavar="DTYPE", help="how the cache keeps its values; see below (auto)"
    )
    parser.add_argument("--page-size", type=int, metavar="TOKENS", help="tokens a page (64)")
    parser.add_argument(
        "--draft-layers",
        metavar="HOW",
        help="none, layers (more layers of the same planes) or planes (their own) (none)",
    )
    parser.add_argument(
        "--override",
        action="append",
        metavar="FIELD=JSON",
        help="put this in place of a field of the config, null to take it away; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the geometry of ``args.config``."""
    from kvferry.geometry import load_config

    told = load_config(args.config)
    given = {name: getattr(args, name) for name in (*_OF_A_MODEL, "page_size")}
    options = {name: value for name, value in given.items() if value is not None}
    described = _by_hand(told, options) if "planes" in told else _of_model(told, options)
    if args.json:
        print(json_text(described))
    else:
        print("\n".join(_table(described)))
    return 0


def _by_hand(told: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    from kvferry.geometry import Geometry

    misplaced = [f"--{name.replace('_', '-')}" for name in _OF_A_MODEL if name in options]
    if misplaced:
        raise GeometryError(
            f"{', '.join(misplaced)}: planes given by hand are those of one rank already; "
            f"only --page-size applies to them"
        )
    page_size = options.get("page_size", told.get("page_size"))
    kept = {name: value for name, value in told.items() if name not in _DERIVED}
    if page_size is not None:
        kept["page_size"] = page_size
    # Planes that a model's config gave are no surer for having been saved.
    assumed = told.get("assumed", [])
    if not isinstance(assumed, list) or not all(isinstance(one, str) for one in assumed):
        raise GeometryError(f"assumed must be a list of texts, not {assumed!r}")
    return _described(Geometry.from_dict(kept), assumed)


def _of_model(told: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    from kvferry.geometry import read_hf_config

    kwargs = dict(options)
    overrides = dict(_override(text) for text in kwargs.pop("override", ()))
    reading = read_hf_config(told, overrides=overrides, **kwargs)
    return _described(reading.geometry, list(reading.assumed))


def _override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise GeometryError(f"--override {text!r} must be FIELD=JSON, such as head_dim=128")
    try:
        return name, json.loads(value)
    except ValueError as bad:
        raise GeometryError(
            f"--override {text!r}: {value!r} is not JSON ({bad}); quote text as '\"bfloat16\"'"
        ) from bad


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

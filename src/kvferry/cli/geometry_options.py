"""The arguments that tell a geometry, for every command that takes one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry.cli.whole_number import whole_number
from kvferry.errors import GeometryError

if TYPE_CHECKING:
    from kvferry.geometry import Geometry

__all__ = ["OF_A_MODEL", "add_geometry_options", "given_options", "read_geometry"]

# What `kvferry geometry --json` adds to a geometry. It follows from the planes, so it is passed
# over when the output of one run is the input of another.
_DERIVED = (
    *("bytes_per_token", "page_bytes", "slot_bytes", "state_bytes", "state_slot_bytes"),
    *("fingerprint", "assumed"),
)
OF_A_MODEL = ("tp", "tp_rank", "pp", "pp_rank", "pp_layers", "kv_dtype", "draft_layers", "override")
"""Names of the arguments that go with a model's config, and not with planes given by hand."""


def add_geometry_options(
    parser: argparse._ActionsContainer,
    *,
    optional: bool = False,
    option: str | None = None,
    page_size: str = "tokens a page (64)",
    kv_dtypes: str = "`kvferry geometry --help` lists the names",
) -> None:
    """Add ``CONFIG`` and the options of a geometry to `parser`.

    Args:
        parser: Of a command, or a group of its arguments.
        optional: The command also works without CONFIG.
        option: The name of the option that CONFIG is the value of, and which must be given; None:
            it is an argument of its own.
        page_size: What ``--page-size`` is.
        kv_dtypes: Where the names are that ``--kv-dtype`` takes.
    """
    told = "a Hugging Face config.json, the folder that holds it, or a JSON file with planes"
    if option is None:
        nargs = "?" if optional else None
        parser.add_argument("config", metavar="CONFIG", nargs=nargs, help=told)
    else:
        parser.add_argument(option, dest="config", metavar="CONFIG", required=True, help=told)
    # Defaults stand in the library. None here tells an option that was not given.
    parser.add_argument("--tp", type=whole_number, metavar="N", help="tensor-parallel ranks (1)")
    parser.add_argument("--tp-rank", type=whole_number, metavar="R", help="this rank (0)")
    parser.add_argument("--pp", type=whole_number, metavar="N", help="pipeline stages (1)")
    parser.add_argument("--pp-rank", type=whole_number, metavar="R", help="this stage (0)")
    parser.add_argument(
        "--pp-layers",
        metavar="N,N,...",
        help="how many layers each stage has (even, the first ones one more)",
    )
    parser.add_argument(
        "--kv-dtype",
        metavar="DTYPE",
        help=f"how the cache keeps its values; {kv_dtypes} (auto)",
    )
    parser.add_argument("--page-size", type=whole_number, metavar="TOKENS", help=page_size)
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


def given_options(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of `names` that were given, with their values."""
    given = {name: getattr(args, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def read_geometry(args: argparse.Namespace) -> tuple[Geometry, list[str]]:
    """The geometry of ``args.config``, and what was assumed of it.

    Raises:
        GeometryError: It cannot be read, or an option does not go with it.
    """
    from kvferry.geometry import load_config

    told = load_config(args.config)
    options = given_options(args, (*OF_A_MODEL, "page_size"))
    return _by_hand(told, options) if "planes" in told else _of_model(told, options)


def _by_hand(told: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Geometry, list[str]]:
    from kvferry.geometry import Geometry

    misplaced = [f"--{name.replace('_', '-')}" for name in OF_A_MODEL if name in options]
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
    return Geometry.from_dict(kept), assumed


def _of_model(told: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Geometry, list[str]]:
    from kvferry.geometry import read_hf_config

    kwargs = dict(options)
    if "pp_layers" in kwargs:
        kwargs["pp_layers"] = _counts(kwargs["pp_layers"])
    overrides = dict(_override(text) for text in kwargs.pop("override", ()))
    reading = read_hf_config(told, overrides=overrides, **kwargs)
    return reading.geometry, list(reading.assumed)


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as bad:
        raise GeometryError(
            f"--pp-layers {text!r} must be whole numbers with commas between, such as 15,15,16,15"
        ) from bad


def _override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise GeometryError(f"--override {text!r} must be FIELD=JSON, such as head_dim=128")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError) as bad:
        raise GeometryError(
            f"--override {text!r}: {value!r} is not JSON ({bad}); quote text as '\"bfloat16\"'"
        ) from bad

"""Reading a Hugging Face config: where it comes from, and its fields with their types checked."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.errors import GeometryError, UnknownArchitectureError

__all__ = [
    "BY_HAND",
    "BY_OVERRIDE",
    "Fields",
    "load_config",
    "other_names",
    "refuse_unread",
    "short",
    "text_fields",
]

BY_HAND = (
    "give the planes by hand: Geometry.from_dict({'planes': [{'name': 'k', 'num_layers': 32, "
    "'element_size': 2048}, ...]}), or `kvferry geometry planes.json` with the same object"
)

BY_OVERRIDE = "with overrides= (--override on the command line)"

_CONFIG_NAME = "config.json"
_MAX_VALUE = 1 << 24
_MAX_NESTING = 8

# A model that sees or hears keeps the fields of its language model under one of these.
_NESTED = ("text_config", "thinker_config", "llm_config", "language_config", "language_model")

# What some published configs leave to the defaults of their model type. Only values that no other
# field tells belong here.
_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "dots3_note_text": {
        "swa_kv_lora_rank": 1024,
        "swa_head_dim": 256,
        "swa_qk_nope_head_dim": 192,
    },
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma4_text": {"head_dim": 256, "global_head_dim": 512},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "qwen3": {"head_dim": 128},
}

# What older configs call the fields that are needed. They are not read: their models may differ in
# more than names, and somebody must have looked.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "hidden_size": ("n_embd", "n_embed", "d_model"),
}

# Model types whose window layers have twice the KV heads of the others, without a field for it.
_TWICE_THE_WINDOW_HEADS = ("mimo_v2_flash",)


class Fields:
    """The fields of a config, or of one layer of it. A field that is null counts as absent.

    What was read and what was assumed is noted, for these fields and all made from them by `over`.
    """

    def __init__(self, told: Mapping[str, Any], made_from: Fields | None = None) -> None:
        self._told = told
        self._read: set[str] = set() if made_from is None else made_from._read
        self._assumed: dict[str, str | None] = {} if made_from is None else made_from._assumed

    @property
    def read(self) -> frozenset[str]:
        """The names that were looked for, there or not."""
        return frozenset(self._read)

    @property
    def assumed(self) -> tuple[str, ...]:
        """What `assume` was told, each once."""
        found = self._assumed.items()
        return tuple(what for what, of in found if of is None or of in self._read)

    def unread(self) -> list[str]:
        """The names of fields that are there and that nobody looked for."""
        return [name for name in self._told if name not in self._read]

    def assume(self, what: str, field: str | None = None) -> None:
        """Note that the config does not tell `what`, a sentence without its full stop.

        With `field` it counts only if that field is read.
        """
        self._assumed[what] = field

    def get(self, name: str) -> Any:
        """The field's value, or None."""
        self._read.add(name)
        return self._told.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.get(name) is not None

    def first(self, *names: str) -> str | None:
        """The first of `names` that is there."""
        return next((name for name in names if self.has(name)), None)

    def integer(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        """A whole number from `low` up.

        Raises UnknownArchitectureError when it is absent and there is no `default`, GeometryError
        when it is something else than such a number.
        """
        value = self.get(name)
        if value is None:
            if default is None:
                raise missing(name)
            return default
        return check_integer(name, value, low)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; GeometryError for anything else."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise GeometryError(f"config field {name} must be true or false, not {value!r}")
        return value

    def sequence(self, name: str) -> Sequence[Any]:
        """A list; GeometryError for anything else."""
        value = self.get(name)
        if not isinstance(value, list | tuple):
            raise GeometryError(f"config field {name} must be a list, not {value!r}")
        return value

    def over(self, more: Mapping[str, Any]) -> Fields:
        """These fields with those of `more` in their place."""
        return Fields({**self._told, **more}, self) if more else self


def missing(*names: str, hint: str = "") -> UnknownArchitectureError:
    """The error for a config that does not tell what `names` would have told."""
    return UnknownArchitectureError(
        f"this config does not describe a KV cache that kvferry can read; missing fields: "
        f"{', '.join(names)}.{hint} Add them {BY_OVERRIDE}, or {BY_HAND}"
    )


def other_names(fields: Fields) -> str:
    """A sentence about fields that may be needed ones under the names of older models; or empty."""
    found = {
        name: other
        for name, others in _OTHER_NAMES.items()
        if not fields.has(name) and (other := fields.first(*others))
    }
    if not found:
        return ""
    there = ", ".join(f"{other} {short(fields.get(other))}" for other in found.values())
    options = " ".join(f"--override {name}={fields.get(other)}" for name, other in found.items())
    return f" It has {there}: if these mean the same, they are {options}."


def check_integer(name: str, value: Any, low: int = 1) -> int:
    """`value` if it is a whole number from `low` up; GeometryError names the field if not."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _MAX_VALUE:
        raise GeometryError(
            f"config field {name} must be a whole number from {low} to {_MAX_VALUE}, "
            f"not {short(value)}"
        )
    return value


def refuse_unread(fields: Fields, overrides: Mapping[str, Any]) -> None:
    """Raise GeometryError for an override that nothing looked for: it would change nothing."""
    for name in overrides:
        if name not in fields.read:
            close = difflib.get_close_matches(str(name), sorted(fields.read), n=3, cutoff=0.5)
            hint = f"; close to it and read are: {', '.join(close)}" if close else ""
            raise GeometryError(
                f"nothing reads the config field {short(name)} of this model with these options, "
                f"so putting {short(overrides[name])} there would change nothing{hint}"
            )


def load_config(config: Any) -> Mapping[str, Any]:
    """The fields of `config`: a mapping, a path to a file or folder, or an object with `to_dict`.

    Raises GeometryError naming the path or type when it cannot be read, or is not an object.
    """
    if isinstance(config, Mapping):
        told: Any = config
    elif isinstance(config, str | os.PathLike):
        told = _read_json(Path(config))
    elif callable(getattr(config, "to_dict", None)):
        told = config.to_dict()
    else:
        raise GeometryError(
            f"a config is a mapping, a path to {_CONFIG_NAME} or its folder, or an object with "
            f"to_dict(); not {type(config).__name__}"
        )
    if not isinstance(told, Mapping):
        raise GeometryError(
            f"a config must be a JSON object with fields such as num_hidden_layers, "
            f"not {type(told).__name__}"
        )
    return told


def text_fields(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Fields:
    """The language model's own fields: nested ones found, left-out ones added, `overrides` last."""
    outer: Mapping[str, Any] = {}
    inner = config
    for _ in range(_MAX_NESTING):
        nested = next((inner[name] for name in _NESTED if inner.get(name) is not None), None)
        if nested is None:
            break
        if not isinstance(nested, Mapping):
            raise GeometryError(
                f"the nested config of the language model must be an object, "
                f"not {type(nested).__name__}"
            )
        outer, inner = {**outer, **inner}, nested
    told: dict[str, Any] = dict(inner)
    for name in ("dtype", "torch_dtype"):
        if told.get("dtype") is None and told.get("torch_dtype") is None and outer.get(name):
            told[name] = outer[name]
    if told.get("quantization_config") is None and outer.get("quantization_config"):
        told["quantization_config"] = outer["quantization_config"]
    told |= overrides
    model_type = told.get("model_type")
    left_out = _LEFT_OUT.get(model_type, {}) if isinstance(model_type, str) else {}
    fields = Fields({**left_out, **told})
    for name in sorted(set(left_out) - set(told)):
        what = f"{name} is {left_out[name]}, as {model_type} has it where nothing is told"
        fields.assume(what, name)
    is_twice = fields.get("model_type") in _TWICE_THE_WINDOW_HEADS
    if is_twice and fields.has("num_key_value_heads") and not fields.has("swa_num_key_value_heads"):
        heads = 2 * fields.integer("num_key_value_heads")
        fields.assume(f"swa_num_key_value_heads is {heads}, twice num_key_value_heads")
        fields = fields.over({"swa_num_key_value_heads": heads})
    return fields


def _read_json(path: Path) -> Any:
    try:
        if path.is_dir():
            path = path / _CONFIG_NAME
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as bad:
        raise GeometryError(
            f"cannot read the model config {short(str(path))}: {bad.strerror or bad}; "
            f"give the path of a {_CONFIG_NAME} or of the folder that holds it"
        ) from bad
    except (ValueError, RecursionError) as bad:
        raise GeometryError(f"{str(path)!r} is not a JSON file: {short(bad)}") from bad


def short(value: object) -> str:
    """`value` as a message shows it: at most 80 characters of it."""
    try:
        text = str(value) if isinstance(value, Exception) else repr(value)
    except ValueError:  # an int of more digits than Python agrees to print
        text = f"a {type(value).__name__} of too many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."

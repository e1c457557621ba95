"""The type of arguments that are counts."""

from __future__ import annotations

import argparse

__all__ = ["whole_number"]


def whole_number(text: str) -> int:
    """What `text` says; argparse's own error where it is no whole number in digits."""
    try:
        return int(text)
    except ValueError as bad:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number; give digits, such as 64"
        ) from bad

"""``kvferry doctor``: what this machine has, what works here, and what to do about the rest."""

from __future__ import annotations

from kvferry.cli.doctor.command import add_parser, run

__all__ = ["add_parser", "run"]

"""The way between a control plane and a data plane in two processes: commands out, answers in.

Whoever has the two processes carries what `take` gives to `DataPlane.execute` over there, and what
its `poll` says back to `deliver`. All of it can be pickled. Nothing here knows a transport.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvferry.tiers.commands import Command, Completion

__all__ = ["CommandQueue"]


class CommandQueue:
    """What a control plane has instead of a data plane, when that is in another process."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._completions: list[Completion] = []

    def submit(self, command: Command) -> None:
        """Put a command into the next batch."""
        self._commands.append(command)

    def take(self) -> list[Command]:
        """The commands since the last time, in their order."""
        commands, self._commands = self._commands, []
        return commands

    def deliver(self, completions: Iterable[Completion]) -> None:
        """Hand over what the data plane's `poll` said."""
        self._completions.extend(completions)

    @property
    def has_news(self) -> bool:
        """Whether `poll` has something to tell."""
        return bool(self._completions)

    def poll(self) -> list[Completion]:
        """What was delivered since the last time."""
        completions, self._completions = self._completions, []
        return completions

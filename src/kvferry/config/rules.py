"""Rules over several settings. Each looks at a whole config and changes nothing.

So there is no order among them, and none can look at a value that is not set yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvferry.config.tree import Config

__all__ = ["RULES", "BrokenRule", "broken_rules"]


class BrokenRule(NamedTuple):
    """What is wrong and what to do, and between which settings."""

    message: str
    settings: tuple[str, ...]


Rule = Callable[["Config"], BrokenRule | None]


def _storage_has_a_backend(config: Config) -> BrokenRule | None:
    if not config.storage.enabled or config.storage.target is not None:
        return None
    return BrokenRule(
        "storage is on without a backend: set storage.url or storage.backend, or "
        "storage.enabled = false",
        ("storage.enabled", "storage.url", "storage.backend"),
    )


def _files_have_a_folder(config: Config) -> BrokenRule | None:
    storage = config.storage
    if not storage.enabled or storage.target != "file" or storage.path is not None:
        return None
    return BrokenRule(
        "storage in files is on without a folder: set storage.path or storage.url, or "
        "storage.enabled = false",
        ("storage.enabled", "storage.url", "storage.backend", "storage.path"),
    )


def _a_url_is_instead_of_its_parts(config: Config) -> BrokenRule | None:
    storage = config.storage
    if storage.url is None:
        return None
    beside = [
        name
        for name, is_set in (
            ("backend", storage.backend not in (None, "file")),
            ("path", storage.path is not None),
        )
        if is_set
    ]
    if not beside:
        return None
    both = " and ".join(f"storage.{name} = {getattr(storage, name)}" for name in beside)
    return BrokenRule(
        f"storage.url says where storage is, and so does {both}: set one of them",
        ("storage.url", *(f"storage.{name}" for name in beside)),
    )


def _options_repeat_no_setting(config: Config) -> BrokenRule | None:
    storage = config.storage
    twice = [
        name
        for name in ("path", "capacity_bytes")
        if name in storage.options and getattr(storage, name) is not None
    ]
    if not twice:
        return None
    both = " and ".join(f"storage.{name} = {getattr(storage, name)}" for name in twice)
    return BrokenRule(
        f"storage.options says {', '.join(twice)} too, beside {both}, and the backend takes one: "
        f"leave it out of storage.options",
        ("storage.options", *(f"storage.{name}" for name in twice)),
    )


def _deadlines_are_in_order(config: Config) -> BrokenRule | None:
    prefetch = config.prefetch
    if prefetch.timeout_base_secs <= prefetch.max_secs:
        return None
    return BrokenRule(
        f"a deadline of prefetch.timeout_base_secs = {prefetch.timeout_base_secs:g} is never "
        f"reached, as prefetch.max_secs = {prefetch.max_secs:g} is shorter: raise that, or lower "
        f"the deadline",
        ("prefetch.timeout_base_secs", "prefetch.max_secs"),
    )


RULES: tuple[Rule, ...] = (
    _storage_has_a_backend,
    _files_have_a_folder,
    _a_url_is_instead_of_its_parts,
    _options_repeat_no_setting,
    _deadlines_are_in_order,
)


def broken_rules(config: Config) -> list[BrokenRule]:
    """All rules that `config` breaks, in an order that is not that of `RULES`."""
    return sorted(broken for rule in RULES if (broken := rule(config)) is not None)

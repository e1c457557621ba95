"""The whole config, frozen."""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.config.options import Options
from kvferry.config.rules import broken_rules
from kvferry.config.sections import (
    ControlConfig,
    HostConfig,
    IntegrityConfig,
    LoadConfig,
    MetricsConfig,
    PrefetchConfig,
    StorageConfig,
    StoreConfig,
    TransferConfig,
)
from kvferry.config.setting import Section, settings_of
from kvferry.errors import ConfigError
from kvferry.switches import Switches

if TYPE_CHECKING:
    from kvferry.config.resolved import Resolved

__all__ = ["SECTIONS", "Config"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a cache, checked one by one and against each other.

    Two configs with the same settings are equal, and can be keys; they pickle.

    Raises:
        ConfigError: A rule between settings is broken, or a section is none.
    """

    host: HostConfig = dataclasses.field(default_factory=HostConfig)
    store: StoreConfig = dataclasses.field(default_factory=StoreConfig)
    load: LoadConfig = dataclasses.field(default_factory=LoadConfig)
    prefetch: PrefetchConfig = dataclasses.field(default_factory=PrefetchConfig)
    storage: StorageConfig = dataclasses.field(default_factory=StorageConfig)
    integrity: IntegrityConfig = dataclasses.field(default_factory=IntegrityConfig)
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
    transfer: TransferConfig = dataclasses.field(default_factory=TransferConfig)
    control: ControlConfig = dataclasses.field(default_factory=ControlConfig)

    def __post_init__(self) -> None:
        for name, section in SECTIONS.items():
            if not isinstance(found := getattr(self, name), section):
                raise ConfigError(
                    f"Config({name}=...) must be a {section.__name__}, not "
                    f"{type(found).__name__}; Config.resolve({name}={{...}}) takes a mapping"
                )
        if broken := broken_rules(self):
            error = ConfigError("; ".join(rule.message for rule in broken))
            error.settings = tuple(dict.fromkeys(name for rule in broken for name in rule.settings))
            raise error

    @classmethod
    def resolve(
        cls,
        path: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        **overrides: Mapping[str, Any],
    ) -> Resolved:
        """The config from all sources, and where each value came from.

        Keyword arguments win over environment variables, these over the file, it over defaults.

        Args:
            path: A TOML file; None: the one that ``KVFERRY_CONFIG`` names, if any.
            environ: Environment variables; None: those of the process.
            **overrides: A mapping of settings for each section: ``host={"num_bytes": "8GiB"}``.

        Raises:
            ConfigError: The file cannot be read; a key of any source is not known; a value is not
                accepted, also one that another source overrides; or a rule is broken.
        """
        from kvferry.config.resolved import resolve

        return resolve(path, environ, overrides)

    def switches(self) -> Switches:
        """Switches for a running cache, as this config has them."""
        return Switches(
            store=self.store.enabled, load=self.load.enabled, storage=self.storage.enabled
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values by section and field, secrets included; `resolve` takes them back."""
        return {
            name: {field: _plain(getattr(getattr(self, name), field)) for field in settings_of(of)}
            for name, of in SECTIONS.items()
        }


SECTIONS: Mapping[str, type[Section]] = types.MappingProxyType(
    {
        "host": HostConfig,
        "store": StoreConfig,
        "load": LoadConfig,
        "prefetch": PrefetchConfig,
        "storage": StorageConfig,
        "integrity": IntegrityConfig,
        "metrics": MetricsConfig,
        "transfer": TransferConfig,
        "control": ControlConfig,
    }
)
"""The class of each section, by its name and in order."""


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return dict(value) if isinstance(value, Options) else value

"""The settings of a cache: one tree, four sources, one precedence. docs/configuration.md lists all.

Importing this reads nothing; `Config.resolve` reads the file and the environment.
"""

from kvferry.config.kinds import size_of
from kvferry.config.options import SECRET, Options
from kvferry.config.resolved import PRECEDENCE, Origin, OriginKind, Resolved
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
from kvferry.config.setting import Section, Setting, settings_of
from kvferry.config.tree import SECTIONS, Config

__all__ = [
    "PRECEDENCE",
    "SECRET",
    "SECTIONS",
    "Config",
    "ControlConfig",
    "HostConfig",
    "IntegrityConfig",
    "LoadConfig",
    "MetricsConfig",
    "Options",
    "Origin",
    "OriginKind",
    "PrefetchConfig",
    "Resolved",
    "Section",
    "Setting",
    "StorageConfig",
    "StoreConfig",
    "TransferConfig",
    "settings_of",
    "size_of",
]

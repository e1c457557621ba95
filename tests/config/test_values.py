"""What each setting accepts, from each source, and what an error says."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.config import SECTIONS, Config, HostConfig, Options, StorageConfig, settings_of
from kvferry.env import setting_variable
from kvferry.errors import ConfigError
from kvferry.types import Mover

_NAMES = [f"{section}.{field}" for section, of in SECTIONS.items() for field in settings_of(of)]


def _toml(value: Any) -> str:
    """`value` in TOML, whose numbers and text are those of JSON but for what JSON has not."""
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items())
        return f"{{{inside}}}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)


def _by_keyword(name: str, value: Any) -> Any:
    section, field = name.split(".")
    tree: dict[str, Any] = {section: {field: value}}
    return Config.resolve(environ={}, **tree)


def _by_file(name: str, value: Any, folder: Path) -> Any:
    section, field = name.split(".")
    path = folder / "kvferry.toml"
    path.write_text(f"[{section}]\n{field} = {_toml(value)}\n")
    return Config.resolve(path, environ={})


def _by_variable(name: str, text: str) -> Any:
    return Config.resolve(environ={setting_variable(*name.split(".")): text})


def _of(config: Config, name: str) -> Any:
    section, field = name.split(".")
    return getattr(getattr(config, section), field)


_ACCEPTED = [
    ("host.num_bytes", 1, 1),
    ("host.num_bytes", 1 << 60, 1 << 60),
    ("host.num_bytes", "8GiB", 8 << 30),
    ("host.num_bytes", "8 gib", 8 << 30),
    ("host.num_bytes", "500MB", 500_000_000),
    ("host.num_bytes", "1.5KiB", 1536),
    ("host.num_bytes", "2TB", 2 * 10**12),
    ("host.num_bytes", "7B", 7),
    ("host.num_bytes", "64Mi", 64 << 20),
    ("host.num_bytes", "64mib", 64 << 20),
    ("host.num_bytes", "64M", 64_000_000),
    ("host.num_bytes", "2.5K", 2500),
    ("host.processes", "none", None),
    ("host.processes", 8, 8),
    ("storage.max_hints", 1, 1),
    ("host.num_bytes", "none", None),
    ("host.reserve_bytes", 0, 0),
    ("host.reserve_bytes", "0B", 0),
    ("host.device_ratio", 2, 2.0),
    ("host.device_ratio", 0.001, 0.001),
    ("host.device_ratio", 1000, 1000.0),
    ("host.state_fraction", 0.001, 0.001),
    ("host.locked", True, True),
    ("store.policy", "write_back", "write_back"),
    ("store.max_queue_pages", 1, 1),
    ("load.threshold_tokens", 0, 0),
    ("load.threshold_tokens", 1 << 31, 1 << 31),
    ("prefetch.timeout_base_secs", 0, 0.0),
    ("prefetch.budget_fraction", 1, 1.0),
    ("prefetch.budget_pages", "none", None),
    ("storage.backend", "memory", "memory"),
    ("storage.backend", "my_package.stores:MyStore", "my_package.stores:MyStore"),
    ("storage.backend", "none", None),
    ("storage.url", "file:///var/kv?fsync=data", "file:///var/kv?fsync=data"),
    ("storage.url", "my_package.stores:MyStore?size=3", "my_package.stores:MyStore?size=3"),
    ("storage.url", "none", None),
    ("storage.path", "/var/cache/kv ferry", Path("/var/cache/kv ferry")),
    ("storage.options", {"region": "eu", "retries": 3, "tls": True}, Options(
        {"region": "eu", "retries": 3, "tls": True})),
    ("storage.options", {}, Options()),
    ("storage.workers", 256, 256),
    ("metrics.max_events", 0, 0),
    ("transfer.mover", "staged", "staged"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "kept"), _ACCEPTED)
def test_what_is_accepted_is_the_same_from_every_source(
    name: str, value: Any, kept: Any, tmp_path: Path
) -> None:
    """Keyword, file and environment lead to one value of one type."""
    text = json.dumps(value) if isinstance(value, bool | dict) else str(value)
    for resolved in (
        _by_keyword(name, value),
        _by_file(name, value, tmp_path),
        _by_variable(name, text),
    ):
        found = _of(resolved.config, name)
        assert found == kept
        assert type(found) is type(kept)


_REFUSED: list[tuple[str, Any, str]] = [
    ("host.num_bytes", 0, "1 or more bytes"),
    ("host.num_bytes", -1, "1 or more bytes"),
    ("host.num_bytes", (1 << 60) + 1, "bytes"),
    ("host.num_bytes", "8Q", "'8GiB' or '500MB'"),
    ("host.num_bytes", "eight", "a unit is B, K,"),
    ("host.num_bytes", "-8GiB", "or 'none'"),
    ("host.num_bytes", "0.3B", "no whole number of bytes"),
    ("host.num_bytes", "1e3KB", "bytes"),
    ("host.num_bytes", "0x10", "bytes"),
    ("host.num_bytes", "\u0661GiB", "bytes"),
    ("host.num_bytes", "None", "or 'none'"),
    ("host.device_ratio", 0, "above 0 and to 1,000"),
    ("host.device_ratio", 1000.5, "above 0 and to 1,000"),
    ("host.device_ratio", math.nan, "a number above 0"),
    ("host.device_ratio", math.inf, "a number above 0"),
    ("host.state_fraction", 0, "above 0 and below 1"),
    ("host.state_fraction", 1, "above 0 and below 1"),
    ("host.state_fraction", -0.1, "above 0 and below 1"),
    ("host.locked", "yes", "true or false"),
    ("host.huge_pages", "on", "'off', 'auto' or 'required'"),
    ("host.eviction_policy", "LRU", "'lru', 'lfu', 'slru', 'fifo', 'mru' or 'priority'"),
    ("store.policy", "write_throug", "'write_through', 'write_through_selective' or"),
    ("store.selective_hits", 0, "from 1 to 2,147,483,648"),
    ("store.selective_hits", 1.0, "a whole number"),
    ("load.threshold_tokens", -1, "from 0"),
    ("prefetch.max_secs", 0, "above 0 and to 86,400 seconds"),
    ("prefetch.timeout_base_secs", -1, "from 0 to 86,400 seconds"),
    ("prefetch.timeout_base_secs", "1s", "seconds"),
    ("prefetch.budget_pages", 0, "from 1"),
    ("prefetch.budget_fraction", 0, "above 0 and to 1"),
    ("storage.backend", "s3://bucket", "package.module:Class"),
    ("storage.backend", "my.module", "package.module:Class"),
    ("storage.path", "cache", "an absolute path"),
    ("storage.path", "~/cache", "an absolute path"),
    ("storage.capacity_bytes", 0, "bytes"),
    ("storage.workers", 257, "from 1 to 256"),
    ("storage.batch_pages", 0, "from 1 to 65,536"),
    ("integrity.verify", "never", "'always', 'storage' or 'off'"),
    ("transfer.staging_bytes", -1, "0 or more bytes"),
    ("transfer.mover", "none", "'auto', 'direct' or 'staged'"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), _REFUSED)
def test_what_is_refused_is_refused_from_every_source(
    name: str, value: Any, allowed: str, tmp_path: Path
) -> None:
    """The error has the source, the value, and what is allowed."""
    variable = setting_variable(*name.split("."))
    sources: dict[str, Callable[[], Any]] = {
        f"keyword argument {name}: ": lambda: _by_keyword(name, value),
        f"{tmp_path}/kvferry.toml, {name}: ": lambda: _by_file(name, value, tmp_path),
        f"environment variable {variable}: ": lambda: _by_variable(name, str(value)),
    }
    for source, resolve in sources.items():
        with pytest.raises(ConfigError) as refused:
            resolve()
        message = str(refused.value)
        assert message.startswith(source)
        assert str(value) in message
        assert allowed in message.replace("\\", "")
        assert refused.value.settings == (name,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host.num_bytes", True),
        ("host.num_bytes", 1.0),
        ("host.num_bytes", [1]),
        ("host.device_ratio", True),
        ("host.device_ratio", "2"),
        ("host.locked", 1),
        ("host.locked", "true"),
        ("host.numa", True),
        ("store.selective_hits", True),
        ("store.selective_hits", "2"),
        ("store.policy", 1),
        ("storage.path", 3),
        ("storage.url", 3),
        ("storage.path", "/a\0b"),
        ("storage.backend", 3),
        ("storage.options", ["a"]),
        ("storage.options", "a=1"),
    ],
)
def test_types_are_not_guessed(name: str, value: Any, tmp_path: Path) -> None:
    """Where a source has types, text is no number and no truth value, and 1 is not true."""
    with pytest.raises(ConfigError, match="must be"):
        _by_keyword(name, value)
    with pytest.raises(ConfigError, match="must be"):
        _by_file(name, value, tmp_path)


@pytest.mark.parametrize("name", [name for name in _NAMES if not name.endswith("options")])
def test_every_setting_refuses_what_is_nothing(name: str) -> None:
    """No setting takes any object, or any text, for its value."""
    for value in (object(), "\0", "???", {}, [], math.nan):
        with pytest.raises(ConfigError) as refused:
            _by_keyword(name, value)
        assert refused.value.settings == (name,)
    with pytest.raises(ConfigError, match="must be"):
        _by_variable(name, "???")


@pytest.mark.parametrize(
    ("text", "kept"),
    [("true", True), ("TRUE", True), ("1", True), ("false", False), ("0", False)],
)
def test_switches_in_the_environment(text: str, kept: bool) -> None:
    """An environment variable has words or digits for a switch, and no others."""
    assert _by_variable("store.enabled", text).config.store.enabled is kept
    for other in ("yes", "on", "2", " true", "tru"):
        with pytest.raises(ConfigError, match="true or false"):
            _by_variable("store.enabled", other)


@pytest.mark.parametrize("text", ["1_000", "+1000", "1000"])
def test_numbers_in_the_environment(text: str) -> None:
    """Whole numbers may have a sign and underscores; what Python alone would take is refused."""
    assert _by_variable("store.selective_hits", text).config.store.selective_hits == 1000
    for other in (" 1000", "1000 ", "1__0", "_1", "1e3", "\u0661", "9" * 5000):
        with pytest.raises(ConfigError, match="whole number"):
            _by_variable("store.selective_hits", other)
    assert _by_variable("host.device_ratio", "2.5e0").config.host.device_ratio == 2.5
    for other in (" 2", "nan", "inf", "1_0", "\u0662"):
        with pytest.raises(ConfigError, match="a number above 0"):
            _by_variable("host.device_ratio", other)


def test_numbers_of_other_types_are_kept_as_plain_ones() -> None:
    """A numpy integer, an enum of words or a path object becomes what the config promises."""
    config = _by_keyword("store.selective_hits", np.int64(3)).config
    assert type(config.store.selective_hits) is int
    config = _by_keyword("transfer.mover", Mover.STAGED).config
    assert type(config.transfer.mover) is str
    assert not isinstance(config.transfer.mover, enum.Enum)
    config = _by_keyword("storage.path", Path("/x")).config
    assert config.storage.path == Path("/x")
    config = _by_keyword("host.device_ratio", np.float64(3)).config
    assert type(config.host.device_ratio) is float
    assert _by_keyword("host.num_bytes", None).config.host.num_bytes is None


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"a": [1]}, "'a' is list"),
        ({"a": None}, "'a' is NoneType"),
        ({"a": math.nan}, "'a' is float or not finite"),
        ({"": 1}, "'' is no name"),
        ({3: 1}, "3 is no name"),
    ],
)
def test_options_are_plain_values(value: Any, why: str) -> None:
    """What a file could not hold, or a process could not be sent, is refused by its name."""
    with pytest.raises(ConfigError, match=why):
        _by_keyword("storage.options", value)


def test_options_of_an_environment_variable_are_json() -> None:
    """Text that is no JSON object is refused, and is not repeated: it may hold a secret."""
    for text in ('{"password": "hunter2"', '["hunter2"]', '{"password": ["hunter2"]}'):
        with pytest.raises(ConfigError, match="a JSON object") as refused:
            _by_variable("storage.options", text)
        assert "hunter2" not in str(refused.value)


def test_options_do_not_change_and_do_not_tell_secrets() -> None:
    """They are a copy, hash and pickle by value, and their repr leaves out what is secret."""
    given: dict[str, Any] = {"region": "eu", "secret_access_key": "hunter2"}
    options = StorageConfig(options=Options(given)).options
    given["region"] = "us"
    assert options["region"] == "eu"
    assert options["secret_access_key"] == "hunter2"
    assert hash(options) == hash(Options(dict(options)))
    assert options == {"region": "eu", "secret_access_key": "hunter2"}
    for name in ("db_password", "apiKey", "TOKEN", "credentials", "client-secret"):
        assert "hunter2" not in repr(StorageConfig(options=Options({name: "hunter2"})))
    with pytest.raises(TypeError):
        options["region"] = "us"  # type: ignore[index]


def test_sections_check_values_however_they_are_made() -> None:
    """A section made by hand is held to the same, and names its own argument."""
    with pytest.raises(ConfigError, match=r"HostConfig\(num_bytes=\.\.\.\): -1 is not accepted"):
        HostConfig(num_bytes=-1)
    assert HostConfig(num_bytes="1KiB").num_bytes == 1024  # type: ignore[arg-type]
    long = "x" * 500
    with pytest.raises(ConfigError) as refused:
        HostConfig(numa=long)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 200


def test_a_refused_url_is_not_repeated() -> None:
    """What stands in it may be a secret."""
    with pytest.raises(ConfigError, match="looks like a secret") as refused:
        _by_keyword("storage.url", "s3://bucket?secret_access_key=hunter2")
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigError, match="user or password") as refused:
        _by_keyword("storage.url", "s3://me:hunter2@bucket")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/var/kv", "it must be a URL such as"),
        ("nowhere://x", "no storage scheme 'nowhere'"),
        ("file://var/kv", "an absolute path behind file://"),
    ],
)
def test_a_url_says_where(url: str, words: str) -> None:
    """What is wrong with it, from any source."""
    with pytest.raises(ConfigError, match=rf"^keyword argument storage\.url: .*{words}"):
        _by_keyword("storage.url", url)
    with pytest.raises(ConfigError, match=rf"variable KVFERRY_STORAGE_URL: .*{words}"):
        _by_variable("storage.url", url)

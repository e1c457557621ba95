"""Precedence, origins, unknown keys, files, and that no order changes the result."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvferry.config.rules
from kvferry.config import (
    PRECEDENCE,
    SECTIONS,
    Config,
    HostConfig,
    Options,
    Origin,
    OriginKind,
    StoreConfig,
    settings_of,
)
from kvferry.errors import ConfigError

_NAMES = [f"{section}.{field}" for section, of in SECTIONS.items() for field in settings_of(of)]


@pytest.mark.parametrize("present", list(itertools.product([True, False], repeat=3)))
def test_an_earlier_source_wins(present: tuple[bool, bool, bool], tmp_path: Path) -> None:
    """Keyword, environment, file, default: the first that is there gives value and origin."""
    keyword, environment, file = present
    path = tmp_path / "kvferry.toml"
    path.write_text("[store]\nselective_hits = 3\n" if file else "")
    resolved = Config.resolve(
        path,
        environ={"KVFERRY_STORE_SELECTIVE_HITS": "4"} if environment else {},
        **({"store": {"selective_hits": 5}} if keyword else {}),
    )
    expected = [
        (5, Origin(OriginKind.KEYWORD)),
        (4, Origin(OriginKind.ENVIRONMENT, "KVFERRY_STORE_SELECTIVE_HITS")),
        (3, Origin(OriginKind.FILE, str(path))),
        (2, Origin(OriginKind.DEFAULT)),
    ]
    there = (*present, True)
    value, origin = next(one for one, is_there in zip(expected, there, strict=True) if is_there)
    assert resolved.config.store.selective_hits == value
    assert resolved.origin_of["store.selective_hits"] == origin
    assert resolved.config == Config(store=StoreConfig(selective_hits=value))


def test_sources_meet_setting_by_setting(tmp_path: Path) -> None:
    """A section may have values from all sources, and a source that sets one hides no other."""
    path = tmp_path / "kvferry.toml"
    path.write_text('[host]\nnuma = "off"\nlocked = true\nnum_bytes = "1GiB"\n')
    resolved = Config.resolve(
        path, {"KVFERRY_HOST_NUM_BYTES": "2GiB"}, host={"eviction_policy": "lfu"}
    )
    assert resolved.config.host == HostConfig(
        numa="off", locked=True, num_bytes=2 << 30, eviction_policy="lfu"
    )
    told = {name: str(resolved.origin_of[name]) for name in _NAMES if name.startswith("host.")}
    assert told == {
        "host.num_bytes": "environment KVFERRY_HOST_NUM_BYTES",
        "host.device_ratio": "default",
        "host.state_fraction": "default",
        "host.huge_pages": "default",
        "host.numa": f"file {path}",
        "host.locked": f"file {path}",
        "host.reserve_bytes": "default",
        "host.processes": "default",
        "host.eviction_policy": "keyword",
    }


def test_every_setting_has_an_origin_in_order() -> None:
    """Origins are those of all settings, in the order of the tree."""
    resolved = Config.resolve(environ={})
    assert list(resolved.origin_of) == _NAMES
    assert {origin.kind for origin in resolved.origin_of.values()} == {OriginKind.DEFAULT}
    assert resolved.config == Config()
    assert resolved.file is None


def test_precedence_in_words_is_that_of_the_kinds() -> None:
    """The sentence that is printed names the sources in the order that they win in."""
    places = [PRECEDENCE.index(word) for word in ("keyword", "environment", "file", "default")]
    assert places == sorted(places)
    assert [kind.value for kind in OriginKind] == ["keyword", "environment", "file", "default"]


def test_a_value_that_says_none_hides_a_lower_source(tmp_path: Path) -> None:
    """None is a value: it can be asked for above a file that has a number."""
    path = tmp_path / "kvferry.toml"
    path.write_text("[host]\nnum_bytes = 5\n")
    for resolved in (
        Config.resolve(path, {}, host={"num_bytes": None}),
        Config.resolve(path, {"KVFERRY_HOST_NUM_BYTES": "none"}),
    ):
        assert resolved.config.host.num_bytes is None
        assert resolved.origin_of["host.num_bytes"].kind is not OriginKind.DEFAULT
    # An empty variable is one that is not set.
    assert Config.resolve(path, {"KVFERRY_HOST_NUM_BYTES": ""}).config.host.num_bytes == 5


def test_a_value_that_is_overridden_must_be_right_too(tmp_path: Path) -> None:
    """A mistake is told while it has no effect, not when the override goes."""
    path = tmp_path / "kvferry.toml"
    path.write_text("[storage]\nworkers = 0\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}, storage.workers: 0 is not")):
        Config.resolve(path, {"KVFERRY_STORAGE_WORKERS": "3"}, storage={"workers": 2})
    path.write_text("[storage]\nworkers = 1\n")
    with pytest.raises(ConfigError, match="KVFERRY_STORAGE_WORKERS: 0 is not"):
        Config.resolve(path, {"KVFERRY_STORAGE_WORKERS": "0"}, storage={"workers": 2})


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"hosts": {}}, "hosts: there is no such setting; the nearest is host,"),
        ({"host": {"numbytes": 1}}, "host.numbytes: .* nearest is host.num_bytes,"),
        ({"host": {"num-bytes": 1}}, "host.num-bytes: .* nearest is host.num_bytes,"),
        ({"host": {"NUM_BYTES": 1}}, "host.NUM_BYTES: .* nearest is host.num_bytes,"),
        ({"store": {"path": "/x"}}, "store.path: .* nearest is storage.path,"),
        ({"host_num_bytes": 1}, "host_num_bytes: .* nearest is host.num_bytes,"),
        ({"host.num_bytes": 1}, "host.num_bytes: .* nearest is host.num_bytes,"),
        ({"host": {"": 1}}, "host.: there is no such setting"),
        ({"": 1}, "there is no such setting"),
    ],
)
def test_unknown_keys_are_errors_with_the_nearest(
    tree: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """A key that nothing reads is refused, by keyword and in a file, with what was meant."""
    with pytest.raises(ConfigError, match=f"keyword argument .*{said}"):
        Config.resolve(environ={}, **tree)
    path = tmp_path / "kvferry.toml"
    lines = []
    for section, fields in tree.items():
        if isinstance(fields, dict):
            lines.append(f'["{section}"]')
            lines += [f'"{field}" = {value!r}' for field, value in fields.items()]
        else:
            lines.insert(0, f'"{section}" = {fields!r}')
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}, .*{said}"):
        Config.resolve(path, environ={})


def test_an_unknown_variable_is_an_error() -> None:
    """The environment is held to the same."""
    with pytest.raises(ConfigError, match="nearest is KVFERRY_STORAGE_PATH"):
        Config.resolve(environ={"KVFERRY_STORAGE_PAHT": "/x"})


@pytest.mark.parametrize("fields", [3, "x", None, [1], HostConfig()])
def test_a_section_is_a_mapping(fields: Any, tmp_path: Path) -> None:
    """A value in place of a section is refused, by name."""
    with pytest.raises(ConfigError, match=r"keyword argument host: .* must be a mapping"):
        Config.resolve(environ={}, host=fields)
    path = tmp_path / "kvferry.toml"
    path.write_text("host = 3\n")
    with pytest.raises(ConfigError, match="host: 3 must be a table of settings"):
        Config.resolve(path, environ={})
    with pytest.raises(ConfigError, match=r"Config\(host=\.\.\.\) must be a HostConfig"):
        Config(host={"num_bytes": 1})  # type: ignore[arg-type]


def test_the_file_is_the_one_that_is_given_or_the_variable_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path in the program stands in for KVFERRY_CONFIG, which is read from the process too."""
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text("[load]\nthreshold_tokens = 1\n")
    other.write_text("[store]\nselective_hits = 7\n")
    environ = {"KVFERRY_CONFIG": str(one)}
    resolved = Config.resolve(environ=environ)
    assert (resolved.file, resolved.config.load.threshold_tokens) == (one, 1)
    resolved = Config.resolve(str(other), environ)
    assert resolved.file == other
    assert resolved.config == Config(store=StoreConfig(selective_hits=7))
    monkeypatch.setenv("KVFERRY_CONFIG", str(one))
    monkeypatch.setenv("KVFERRY_LOAD_THRESHOLD_TOKENS", "2")
    assert Config.resolve().config.load.threshold_tokens == 2
    assert Config.resolve(environ={}).config == Config()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"host = [[]\n[", "line 2"),
        (b"[host]\nlocked = true\nlocked = false\n", "line 3"),
        (b"\xff\xfe", "utf-8"),
        (b"[host]\nlocked = yes\n", "line 2"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read(content: bytes | None, said: str, tmp_path: Path) -> None:
    """What is absent or no TOML is an error with the path and the place, never no settings."""
    path = tmp_path / "kvferry.toml"
    if content is not None:
        path.write_bytes(content)
    for named in ({"path": path}, {"environ": {"KVFERRY_CONFIG": str(path)}}):
        with pytest.raises(ConfigError, match=re.escape(str(path))) as refused:
            Config.resolve(**named)
        assert said in str(refused.value)
    with pytest.raises(ConfigError, match="Is a directory"):
        Config.resolve(tmp_path, {})


def test_all_mistakes_are_told_at_once() -> None:
    """One error has everything that is wrong with a source, and which settings that are."""
    with pytest.raises(ConfigError) as refused:
        Config.resolve(environ={}, storage={"workers": 0, "batch_pages": 0}, sotre={})
    for said in ("storage.workers: 0", "storage.batch_pages: 0", "sotre: there is no such"):
        assert said in str(refused.value)
    assert refused.value.settings == ("storage.batch_pages", "storage.workers")


_SCENE: dict[str, Any] = {
    "host": {"num_bytes": "4GiB", "numa": "off", "locked": True},
    "store": {"policy": "write_back", "selective_hits": 4},
    "prefetch": {"max_secs": 5, "timeout_base_secs": 4.5},
    "storage": {"enabled": True, "path": "/x", "options": {"a": 1, "b": "c"}},
}
_ENVIRON = {
    "KVFERRY_HOST_NUMA": "auto",
    "KVFERRY_PREFETCH_MAX_SECS": "6",
    "KVFERRY_STORAGE_BACKEND": "memory",
    "KVFERRY_METRICS_ENABLED": "1",
}


def _in_another_order(tree: dict[str, Any], shuffle: random.Random) -> dict[str, Any]:
    items = list(tree.items())
    shuffle.shuffle(items)
    return {
        name: _in_another_order(one, shuffle) if isinstance(one, dict) else one
        for name, one in items
    }


@given(st.randoms(use_true_random=False))
def test_no_order_changes_the_result(shuffle: random.Random) -> None:
    """Resolved twice, and with sections, settings and variables in any order: the same."""
    first = Config.resolve(environ=_ENVIRON, **_SCENE)
    again = Config.resolve(
        environ=_in_another_order(_ENVIRON, shuffle), **_in_another_order(_SCENE, shuffle)
    )
    assert again == first
    assert list(again.origin_of) == list(first.origin_of)


_BROKEN: dict[str, Any] = {
    "storage": {"enabled": True, "backend": None, "workers": 3},
    "prefetch": {"timeout_base_secs": 9, "max_secs": 8},
}


@pytest.mark.parametrize("rules", list(itertools.permutations(kvferry.config.rules.RULES)))
@pytest.mark.parametrize("scene", [_SCENE, _BROKEN])
def test_no_order_of_rules_changes_the_result(
    rules: Any, scene: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict and its message are the same whichever rule looks first."""

    def verdict() -> object:
        try:
            return Config.resolve(environ={}, **scene)
        except ConfigError as refused:
            return str(refused), refused.settings

    expected = verdict()
    monkeypatch.setattr(kvferry.config.rules, "RULES", rules)
    assert verdict() == expected


def test_rules_see_a_whole_config_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule runs before every value is set, and a config cannot be changed by one."""
    seen: list[Config] = []

    def look(config: Config) -> None:
        assert list(config.to_dict()) == list(SECTIONS)
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.host.numa = "off"  # type: ignore[misc]
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.host = HostConfig()  # type: ignore[misc]
        seen.append(config)

    monkeypatch.setattr(kvferry.config.rules, "RULES", (look,))
    resolved = Config.resolve(environ=_ENVIRON, **_SCENE)
    assert seen == [resolved.config]


@pytest.mark.parametrize(
    ("scene", "said", "settings"),
    [
        (
            {"storage": {"enabled": True}},
            r"set storage\.path.*storage\.enabled is from keyword.*storage\.path is from default",
            ("storage.enabled", "storage.url", "storage.backend", "storage.path"),
        ),
        (
            {"storage": {"enabled": True, "backend": None}},
            r"set storage\.url or storage\.backend",
            ("storage.enabled", "storage.url", "storage.backend"),
        ),
        (
            {"storage": {"url": "memory://", "backend": "mooncake"}},
            r"so does storage\.backend = mooncake: set one",
            ("storage.url", "storage.backend"),
        ),
        (
            {"storage": {"url": "memory://", "path": Path("/x")}},
            r"so does storage\.path = /x: set one",
            ("storage.url", "storage.path"),
        ),
        (
            {"prefetch": {"max_secs": 0.5}},
            r"timeout_base_secs = 1 .*max_secs = 0\.5.*timeout_base_secs is from default",
            ("prefetch.timeout_base_secs", "prefetch.max_secs"),
        ),
        (
            {"storage": {"path": Path("/x"), "options": Options({"path": "/y"})}},
            r"storage\.options says path too, beside storage\.path = /x.*leave it out",
            ("storage.options", "storage.path"),
        ),
        (
            {"storage": {"capacity_bytes": 9, "options": Options({"capacity_bytes": 8})}},
            r"says capacity_bytes too, beside storage\.capacity_bytes = 9",
            ("storage.options", "storage.capacity_bytes"),
        ),
    ],
)
def test_rules_need_what_they_need(
    scene: dict[str, Any], said: str, settings: tuple[str, ...]
) -> None:
    """A setting that another one needs and that nobody set is an error, with all origins."""
    with pytest.raises(ConfigError, match=said) as refused:
        Config.resolve(environ={}, **scene)
    assert refused.value.settings == settings
    sections = {name: SECTIONS[name](**fields) for name, fields in scene.items()}
    with pytest.raises(ConfigError):
        Config(**sections)  # type: ignore[arg-type]


def test_what_rules_allow() -> None:
    """The smallest configs beside those that are refused are fine."""
    Config.resolve(environ={}, storage={"enabled": True, "path": "/x"})
    Config.resolve(environ={}, storage={"enabled": True, "backend": "memory"})
    Config.resolve(environ={}, storage={"enabled": True, "url": "file:///x", "capacity_bytes": 9})
    Config.resolve(environ={}, storage={"enabled": True, "url": "memory://", "backend": None})
    Config.resolve(environ={}, storage={"enabled": False, "backend": None})
    Config.resolve(environ={}, prefetch={"max_secs": 1})
    options = {"path": "/y", "capacity_bytes": 8}  # a backend of the user's, told in one place
    Config.resolve(environ={}, storage={"backend": "my:Store", "options": options})


def test_a_config_goes_through_its_dictionary_and_through_pickle() -> None:
    """Plain values lead back to the same config; so do the bytes for another process."""
    scene: dict[str, Any] = {
        **_SCENE,
        "storage": {**_SCENE["storage"], "options": {"key": "hunter2"}},
    }
    config = Config.resolve(environ={}, **scene).config
    told: dict[str, Any] = config.to_dict()
    assert config.storage.options == Options({"key": "hunter2"})
    assert Config.resolve(environ={}, **told).config == config
    copy = pickle.loads(pickle.dumps(config))  # noqa: S301  our own bytes
    assert copy == config
    assert hash(copy) == hash(config)


def test_switches_are_those_of_the_config() -> None:
    """A running cache starts with what the config says, and flips do not change the config."""
    config = Config.resolve(environ={}, load={"enabled": False}).config
    switches = config.switches()
    assert switches.state == (True, False, False)
    switches.flip(load=True)
    assert not config.load.enabled
    assert config.switches().state == (True, False, False)

"""Environment variables of settings: names, what is unknown, and what clusters set."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.config import SECTIONS, settings_of
from kvferry.env import VARIABLES, config_file, setting_texts, setting_variable
from kvferry.errors import ConfigError

_TREE = {"host": ("num_bytes", "numa"), "store": ("policy",)}


def test_names_are_derived_from_the_tree() -> None:
    """A tree of sections and fields says which variables there are, and no list does."""
    environ = {
        "KVFERRY_HOST_NUM_BYTES": "8GiB",
        "KVFERRY_STORE_POLICY": "",
        "PATH": "/bin",
        "HOST_NUMA": "auto",
    }
    assert setting_texts(_TREE, environ) == {("host", "num_bytes"): "8GiB"}
    assert setting_texts({"a": ("b",)}, {"KVFERRY_A_B": " x "}) == {("a", "b"): " x "}


def test_the_process_is_read_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mapping the process's own variables count, as they are at the call."""
    assert setting_texts(_TREE) == {}
    monkeypatch.setenv("KVFERRY_HOST_NUMA", "off")
    assert setting_texts(_TREE) == {("host", "numa"): "off"}
    assert setting_texts(_TREE, {}) == {}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("KVFERRY_HOST_NUMBYTES", "KVFERRY_HOST_NUM_BYTES"),
        ("KVFERRY_STROE_POLICY", "KVFERRY_STORE_POLICY"),
        ("KVFERRY_CACHEDIR", "KVFERRY_CACHE_DIR"),
        ("KVFERRY_CONFG", "KVFERRY_CONFIG"),
        ("KVFERRY_", "KVFERRY_"),
    ],
)
def test_an_unknown_variable_is_an_error(name: str, near: str) -> None:
    """A name that begins like ours and is none is refused, with the nearest, also when empty."""
    for text in ("1", ""):
        with pytest.raises(ConfigError, match=rf"{name} is no variable .* nearest is {near}"):
            setting_texts(_TREE, {name: text})


def test_all_unknown_variables_are_told_in_order() -> None:
    """One error names them all, the same whatever the order of the environment."""
    names = ["KVFERRY_ZZ", "KVFERRY_AA"]
    messages = set()
    for order in (names, names[::-1]):
        with pytest.raises(ConfigError) as refused:
            setting_texts(_TREE, dict.fromkeys(order, "1"))
        messages.add(str(refused.value))
    (message,) = messages
    assert message.index("KVFERRY_AA") < message.index("KVFERRY_ZZ")


def test_variables_with_names_of_their_own_are_known() -> None:
    """What the README's table has is no unknown setting."""
    assert setting_texts(_TREE, {one.name: "x" for one in VARIABLES}) == {}


@pytest.mark.parametrize(
    "name",
    [
        "KVFERRY_SERVICE_HOST",
        "KVFERRY_SERVICE_PORT",
        "KVFERRY_SERVICE_PORT_HTTP",
        "KVFERRY_PORT",
        "KVFERRY_PORT_8080_TCP",
        "KVFERRY_PORT_8080_TCP_PROTO",
        "KVFERRY_PORT_53_UDP_ADDR",
        "KVFERRY_METRICS_SERVICE_HOST",
        "KVFERRY_METRICS_PORT_9000_TCP_PORT",
    ],
)
def test_what_clusters_set_is_passed_over(name: str) -> None:
    """A service that is called kvferry puts variables into every container; they are not ours."""
    assert setting_texts(_TREE, {name: "10.0.0.1"}) == {}


@pytest.mark.parametrize(
    "name", ["KVFERRY_PORTS", "KVFERRY_PORT_TCP", "KVFERRY_SERVICE", "KVFERRY__PORT"]
)
def test_what_clusters_do_not_set_is_unknown(name: str) -> None:
    """Only the very names that they make are passed over."""
    with pytest.raises(ConfigError):
        setting_texts(_TREE, {name: "10.0.0.1"})


def test_no_variable_of_ours_is_one_of_theirs_or_two_of_ours() -> None:
    """Names of settings are unique, no other variable has one, and clusters set none of them."""
    tree = {name: settings_of(of) for name, of in SECTIONS.items()}
    names = [setting_variable(section, field) for section in tree for field in tree[section]]
    assert len(set(names)) == len(names)
    assert not set(names) & {one.name for one in VARIABLES}
    found = setting_texts(tree, dict.fromkeys(names, "x"))
    assert len(found) == len(names)


def test_the_file_that_a_variable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVFERRY_CONFIG is an absolute path, or not set."""
    assert config_file() is None
    assert config_file({"KVFERRY_CONFIG": ""}) is None
    monkeypatch.setenv("KVFERRY_CONFIG", "/etc/kvferry.toml")
    assert config_file() == Path("/etc/kvferry.toml")
    assert config_file({}) is None
    with pytest.raises(ConfigError, match=r"KVFERRY_CONFIG='a\.toml' is relative"):
        config_file({"KVFERRY_CONFIG": "a.toml"})

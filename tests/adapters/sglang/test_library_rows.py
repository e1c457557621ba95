"""Functions of the engine's kernel library, over a GPU made of host memory, row by row."""

from __future__ import annotations

from typing import Any

import pytest
from tests.adapters.sglang.fake_world import KINDS, LAYERS, World
from tests.adapters.sglang.hicache_rig import Plane, Rows, scattered

import kvferry.adapters.sglang as adapter
from kvferry.errors import PlanError

_NUM_ROWS = 20
# Pages of an indexer, a page of which 8 does not divide the bytes, and a small state.
_SIZES = (132, 132 * 4, 66, 3 * 1024)


def _planes(world: World, size: int) -> tuple[Plane, Plane]:
    rows = (_NUM_ROWS, _NUM_ROWS)
    return world.plane(size, rows=rows), world.plane(size, rows=rows, token_major=True, seed=7)


def _lists(world: World, load: bool) -> tuple[tuple[Rows, Rows], dict[str, Any]]:
    """Rows of device and host, and the two lists that a call is given."""
    rows = scattered(18, 9, _NUM_ROWS), scattered(19, 9, _NUM_ROWS)
    of_device, of_host = (world.rows(one, KINDS[1]) for one in rows)
    src, dst = (of_host, of_device) if load else (of_device, of_host)
    return rows, {"src_indices": src, "dst_indices": dst}


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("states", [False, True], ids=["pages", "states"])
def test_loads_of_a_layer(world: World, size: int, layer: int, states: bool) -> None:
    """Out of either layout."""
    first, second = _planes(world, size)
    rows, lists = _lists(world, load=True)
    expected = [one.after(True, *rows, [layer]) for one in (first, second)]
    adapter.transfer_kv_per_layer_mla(
        src=first.host_tensors[layer], dst=first.device_tensors[layer], item_size=size, **lists
    )
    call = adapter.transfer_kv_per_layer_mla_pf_lf
    if states:
        call = adapter.transfer_kv_mamba_pf_lf  # type: ignore[assignment]
    call(
        src=second.host_tensor, dst=second.device_tensors[layer], layer_id=layer, item_size=size,
        src_layout_dim=size * LAYERS, **lists,
    )  # fmt: skip
    first.check(expected[0], "layer_first")
    second.check(expected[1], "token_major")


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("states", [False, True], ids=["pages", "states"])
def test_write_back_of_all_layers(world: World, size: int, states: bool) -> None:
    """Into either layout."""
    first, second = _planes(world, size)
    rows, lists = _lists(world, load=False)
    expected = [one.after(False, *rows, range(LAYERS)) for one in (first, second)]
    adapter.transfer_kv_all_layer_mla(
        src_layers=world.table(first.device_tensors), dst_layers=world.table(first.host_tensors),
        item_size=size, num_layers=LAYERS, **lists,
    )  # fmt: skip
    given: dict[str, Any] = {
        "dst": second.host_tensor, "item_size": size, "dst_layout_dim": size * LAYERS,
        "num_layers": LAYERS, **lists,
    }  # fmt: skip
    addresses = world.table(second.device_tensors)
    if states:
        adapter.transfer_kv_mamba_lf_pf(src_ptrs=addresses, **given)
    else:
        adapter.transfer_kv_all_layer_mla_lf_pf(src_layers=addresses, **given)
    first.check(expected[0], "layer_first")
    second.check(expected[1], "token_major")


def test_write_back_of_one_layer(world: World) -> None:
    """The same function as for a load, with the sides changed."""
    plane, _ = _planes(world, 132)
    rows, lists = _lists(world, load=False)
    expected = plane.after(False, *rows, [1])
    adapter.transfer_kv_per_layer_mla(
        src=plane.device_tensors[1], dst=plane.host_tensors[1], item_size=132, **lists
    )
    plane.check(expected, "one layer")


def test_fewer_layers_than_a_table_has(world: World) -> None:
    """The first of them move, and no others."""
    plane, _ = _planes(world, 132)
    rows, lists = _lists(world, load=False)
    expected = plane.after(False, *rows, range(2))
    adapter.transfer_kv_all_layer_mla(
        world.table(plane.device_tensors), world.table(plane.host_tensors),
        item_size=132, num_layers=2, **lists,
    )  # fmt: skip
    plane.check(expected, "two layers")


def test_bytes_behind_the_last_whole_row(world: World) -> None:
    """A buffer that ends with part of a row has the rows before it."""
    plane, _ = _planes(world, 132)
    rows, lists = _lists(world, load=True)
    expected = plane.after(True, *rows, [0])
    odd = world.pinned(_NUM_ROWS * 132 + 50)
    odd[: _NUM_ROWS * 132] = plane.host_tensors[0].flatten()
    adapter.transfer_kv_per_layer_mla(odd, plane.device_tensors[0], item_size=132, **lists)
    plane.check(expected, "odd")


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_that_is_not_there(world: World, layer: int) -> None:
    """Refused before a byte moves."""
    _, plane = _planes(world, 132)
    _, lists = _lists(world, load=True)
    before = plane.images()
    with pytest.raises(PlanError, match="do not lie in rows of 396"):
        adapter.transfer_kv_per_layer_mla_pf_lf(
            plane.host_tensor, plane.device_tensors[0], layer_id=layer, item_size=132,
            src_layout_dim=132 * LAYERS, **lists,
        )  # fmt: skip
    plane.check(before, "refused")


@pytest.mark.parametrize("num_layers", [0, LAYERS + 1])
def test_layers_that_are_not_there(world: World, num_layers: int) -> None:
    """Refused before a byte moves, whichever layout the host has."""
    first, second = _planes(world, 132)
    _, lists = _lists(world, load=False)
    before = [first.images(), second.images()]
    with pytest.raises(PlanError, match=f"num_layers is {num_layers}"):
        adapter.transfer_kv_all_layer_mla(
            world.table(first.device_tensors), world.table(first.host_tensors),
            item_size=132, num_layers=num_layers, **lists,
        )  # fmt: skip
    with pytest.raises(PlanError):
        adapter.transfer_kv_all_layer_mla_lf_pf(
            world.table(second.device_tensors), second.host_tensor, item_size=132,
            dst_layout_dim=132 * LAYERS, num_layers=num_layers, **lists,
        )  # fmt: skip
    first.check(before[0], "refused")
    second.check(before[1], "refused")

"""The case from the field: eight ranks, a sparse model's planes, tiny pools, a pool over machines.

GLM-5.2 has 78 layers of 656 bytes and 21 of 132 for its indexer; here there are fewer. Host memory
is 2.5 times the device's, everything is written through to a real Mooncake, and prefetches have so
short a deadline that it passes for some ranks and not for others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.field.replica import PAGE, Case, Rows, geometry_of, namespace_of, pages_of, prompts_of
from tests.storage.mooncake.pool_rig import Master, Member, store_module

from kvferry import KVFerry

_SECS = 100.0
_REQUESTS, _SOAK_REQUESTS = 400, 1000
"""Of a plain run; and of a soak, for each of its factors: ten thousand with ten."""


def run(folder: Path, case: Case, secs: float) -> list[dict[str, Any]]:
    """What each rank reports."""
    told = json.dumps(dataclasses.asdict(case))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.field.replica",
            str(folder),
            told,
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=secs,
        check=False,
    )
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert done.returncode == 0, f"{errors}\n{done.stderr[-4000:]}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(case.size)]


def read_back(case: Case) -> tuple[int, int]:
    """Of all prompts, by a process that computed none: pages that storage has; and wrong ones."""
    geometry = geometry_of(case)
    rows = Rows(dataclasses.replace(case, device_pages=case.longest), geometry)
    found = wrong = 0
    with KVFerry(
        geometry,
        rows.view,
        namespace=namespace_of(geometry),
        host={"num_bytes": "8MiB"},
        load={"threshold_tokens": 1},
        prefetch={"policy": "wait_complete", "threshold_tokens": 1},
        storage=case.storage,
    ) as cache:
        for prompt in prompts_of(case):
            cache.prefetch(prompt).wait(60)
            with cache.match(prompt) as match:
                load = cache.load(match, device_slots=np.arange(match.num_tokens))
            load.wait(60)
            pages = load.usable_tokens // PAGE
            found += pages
            for page, key in enumerate(pages_of(prompt)[:pages]):
                wrong += bool(rows.wrong(key, page))
            rows.poison(list(range(case.longest)))
    return found, wrong


@pytest.mark.soak
@pytest.mark.timeout(3600)  # of a soak
def test_eight_ranks_over_one_pool(
    tmp_path: Path, soak_factor: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never a wrong byte, and never a prefix that nobody computed; ranks agree on each request."""
    store_module()
    with contextlib.ExitStack() as servers:
        master = servers.enter_context(Master())
        servers.enter_context(Member(master.address, 256 << 20))
        case = Case(
            storage=f"mooncake://{master.address}?buffer_bytes=4MiB&key_prefix=field/",
            requests=_REQUESTS if soak_factor == 1 else _SOAK_REQUESTS * soak_factor,
            budget_secs=_SECS * soak_factor,
        )
        told = run(tmp_path, case, _SECS * soak_factor)
        found, wrong = read_back(case)
    assert [one["wrong"] for one in told] == [[]] * case.size
    assert [one["too_far"] for one in told] == [0] * case.size
    assert all(one["clean"] for one in told)
    assert {tuple(one["hits"]) for one in told} == {tuple(told[0]["hits"])}
    assert {tuple(one["keys"]) for one in told} == {tuple(told[0]["keys"])}
    assert [one["breaker"] for one in told] == ["closed"] * case.size
    # It was worth it: pages came from all tiers, deadlines passed for some, requests were aborted.
    hits = sum(told[0]["hits"])
    figures = {
        "requests": case.requests,
        "pages_hit": hits,
        "pages_of_prompts": len(told[0]["keys"]),
        **{name: [one[name] for one in told] for name in ("from_storage", "late", "aborted")},
    }
    with capsys.disabled():
        sys.stdout.write(f"\n{json.dumps(figures)}\n")
    assert hits > case.requests
    assert all(one["from_storage"] for one in told)
    assert sum(one["late"] for one in told) > 0
    assert len(told[0]["keys"]) > case.host_ratio * case.device_pages  # so that much was evicted
    assert all(one["aborted"] for one in told)
    assert told[0]["flushed"]
    assert wrong == 0
    assert found == sum(len(prompt) // PAGE for prompt in prompts_of(case))

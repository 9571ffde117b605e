"""Redis fails over in the middle of a drain: three Sentinels, a master that dies, its replica."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.daemon.redises import Trio, trio
from tests.e2e.harness import GATE, STOP_AND_COPY, Golden, live_plan, running
from tmd.core.values.model import Phase
from tmd.testing.clients import until

pytestmark = pytest.mark.thorough

WITHIN_S = 30.0


def named(group: Trio) -> list[int]:
    """The port of the master, by each Sentinel."""
    found = []
    for port in group.sentinels:
        with contextlib.closing(Redis(port=port, decode_responses=True)) as sentinel:
            address: Any = sentinel.sentinel_get_master_addr_by_name("tmd")
            found.append(int(address[1]))
    return found


def is_watched(group: Trio) -> bool:
    """Whether each Sentinel knows the two others and a replica that is up."""
    for port in group.sentinels:
        with contextlib.closing(Redis(port=port, decode_responses=True)) as sentinel:
            others: Any = sentinel.sentinel_sentinels("tmd")
            replicas: Any = sentinel.sentinel_slaves("tmd")
        if len(others) != 2 or [r["master-link-status"] for r in replicas] != ["ok"]:
            return False
    return True


@pytest.mark.parametrize("server", ["redis_binary", "valkey_binary"])
async def test_the_master_dies_in_the_middle_of_a_drain(
    server: str, request: pytest.FixtureRequest, tmp_path: Path, golden: Golden
) -> None:
    """The replica has the plan: the same one is carried out, once, with the golden numbers."""
    with trio(request.getfixturevalue(server), tmp_path) as group:
        await until(lambda: is_watched(group), within_s=WITHIN_S)
        # Step 20 comes once the leader has seen the move: without Redis it sees nothing.
        faults = [GATE, "between@0:20=wait"]
        async with running(
            tmp_path / "run", group.url, faults=faults, more_config=STOP_AND_COPY
        ) as run:
            await run.drain_at_gate()
            held = live_plan(await run.in_phase(Phase.READY))
            master, replica = group.servers
            group.servers[master].kill()
            group.servers[master].wait()
            await until(lambda: named(group) == [replica] * 3, within_s=WITHIN_S)
            after = live_plan(await run.armed())
            run.let_go("forward")
            plan = await run.done("drain")

            assert held is not None
            assert after is not None
            assert (after.id, plan.id) == (held.id, held.id)
            assert [move.rank for move in plan.moves] == [1]
            await run.ends_like(golden)

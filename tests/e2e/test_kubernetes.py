"""A cordoned node gives its rank away while a real job trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import GATE, STOP_AND_COPY, Golden, history, running
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.conftest import operator_process, until
from tests.marks import extra
from tmd.core.values.model import PlanKind
from tmd.embedded import EmbeddedRedis


@pytest.mark.thorough
async def test_a_cordoned_node_gives_its_rank_away_and_the_request_is_complete(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """Not before the rank has moved. With --leave the launcher there ends with success."""
    extra("kubernetes")
    with ApiServer() as server:
        for name in ("h1", "h2", "h3", "s1"):
            server.node(name)
        (tmp_path / "kubeconfig").write_text(server.kubeconfig())
        faults = [GATE, "between@1:20=wait"]
        async with running(tmp_path, redis.url, faults=faults, more_config=STOP_AND_COPY) as run:
            known = {"TMD_CONFIG": str(run.cluster.config("h1"))}
            known["KUBECONFIG"] = str(tmp_path / "kubeconfig")
            with operator_process("--leave", "--every", "1", **known):
                await run.at_gate()
                server.node("h2", cordoned=True)
                server.drain("d1", "h2")
                await run.armed()
                early = condition(server)
                run.let_go("forward")
                plan = await run.done("drain")
                code = await run.cluster.launchers["h2"].wait()
                await until(lambda: condition(server) == "True", "the request is complete", 30)
            view = await run.cluster.view()
            run.let_go("between")

            assert early == ""
            assert code == 0
            assert plan.moves[0].leaver.host == "h2"
            assert [p.kind for p in history(view)] == [PlanKind.PLANNED]
            await run.ends_like(golden)


def condition(server: ApiServer) -> str:
    found = server.condition("drainrequests", "d1", "DrainComplete", "nvsentinel")
    return str(found.get("status", ""))

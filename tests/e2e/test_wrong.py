"""A script that is ported wrongly is found out, and its standbys train nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import wrong
from tests.e2e.harness import PACE, Run, history, running
from tests.marks import thorough
from tmd.core.values.model import ClusterView, Severity
from tmd.embedded import EmbeddedRedis

SCRIPT = wrong.__file__


async def alerted(run: Run, code: str) -> str:
    """The message of the first alert of ``code``, which an operator sees."""

    def found(view: ClusterView) -> list[str]:
        raised = [a for host in view.hosts for a in host.alerts if a.code == code]
        assert all(a.severity is Severity.WARNING for a in raised)
        return [a.message for a in raised]

    view = await run.cluster.until(lambda v: bool(found(v)), f"an alert {code}")
    return found(view)[0]


@pytest.mark.parametrize(
    ("way", "what"),
    [
        thorough("counter", "(first of all weight)"),
        thorough("prefetch", "inputs of allreduce"),
        thorough("noise", "inputs of allreduce"),
        ("seed", "inputs of allreduce"),
        thorough("part", "inputs of allreduce"),
    ],
)
async def test_a_rehearsal_finds_what_is_not_registered(
    way: str, what: str, tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """The alert names what differed first. The standby gets no rank, and training goes on."""
    wrongly = ["--wrong", way]
    async with running(
        tmp_path, redis.url, faults=[PACE], arguments=wrongly, rehearse=True, script=SCRIPT
    ) as run:
        message = await alerted(run, "standby.unfit")
        ((_, verdict),) = await run.rehearsed(1)

        assert verdict.suspect
        assert what in message
        assert "check for state that session.register() does not know" in message
        await run.cluster.drain("h2", soft=True)
        run.let_go("between")
        assert set((await run.cluster.finished(60)).values()) == {0}
        assert history(await run.cluster.view()) == ()


async def test_an_average_that_is_not_registered_is_named(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """No rehearsal shows it, since it changes no gradient."""
    wrongly = ["--wrong", "average"]
    async with running(tmp_path, redis.url, faults=[PACE], arguments=wrongly, script=SCRIPT) as run:
        message = await alerted(run, "trainer.unregistered_state")
        run.let_go("between")

        assert "steps change AveragedModel, which session.register() does not know" in message
        assert set((await run.cluster.finished(60)).values()) == {0}


@pytest.mark.thorough
async def test_a_rank_that_the_script_keeps_is_named(tmp_path: Path, redis: EmbeddedRedis) -> None:
    """No number shows it: the loop only prints by ``master``, which is of the start."""
    wrongly = ["--wrong", "master"]
    async with running(tmp_path, redis.url, faults=[PACE], arguments=wrongly, script=SCRIPT) as run:
        message = await alerted(run, "trainer.rank_kept")
        run.let_go("between")

        assert "wrong.py:" in message
        assert "decides by 'master', which line" in message
        assert set((await run.cluster.finished(60)).values()) == {0}

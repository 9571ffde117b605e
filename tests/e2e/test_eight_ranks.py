"""Eight ranks on four hosts: two pipelines of two stages, each divided by tensor parallelism."""

from itertools import product
from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import LONG, PACE, Run, running
from tests.e2e.spread import script
from tmd.core.values.model import MigrationPlan, Phase, PlanKind
from tmd.demo.cluster import ready
from tmd.demo.report import read_trace
from tmd.embedded import EmbeddedRedis
from tmd.fabric.topology import neighbours

HOSTS = ("h1", "h2", "h3", "h4")
PER_HOST = 2
RANKS = len(HOSTS) * PER_HOST
PLACES = list(product(range(2), repeat=3))
"""By rank: data, pipeline, tensor."""
PIPELINE = 1


pytestmark = pytest.mark.usefixtures("compiler")


def along(rank: int, dim: int) -> tuple[int, ...]:
    """The group of a rank along a dimension."""
    return tuple(
        other
        for other, place in enumerate(PLACES)
        if all(p == q for d, (p, q) in enumerate(zip(place, PLACES[rank], strict=True)) if d != dim)
    )


def needed(stayer: int, leavers: tuple[int, ...]) -> int:
    """Links that ``stayer`` must open when these ranks move."""
    world = tuple(range(RANKS))
    groups = [world, world, *(along(stayer, dim) for dim in range(3))]  # the vote uses a world, too
    found = 0
    for leaver in leavers:
        for group in groups:
            near = neighbours(group.index(stayer), len(group))
            found += leaver in {group[place] for place in near}
        if leaver in along(stayer, PIPELINE):
            found += 2  # messages, one link for each direction
    return found


def opened(run: Run, plan: MigrationPlan, rank: int) -> int:
    """Links that a stayer opened because of ``plan``."""
    commits = read_trace(run.cluster.trace).commits
    lines = [line for (r, _), line in commits.items() if r == rank]
    before = [x["links_opened"] for x in lines if x["at"] < plan.timeline[0].at]
    after = [x["links_opened"] for x in lines if x["epoch"] == plan.new.epoch]
    return int(max(after) - max(before))


@pytest.mark.thorough
@pytest.mark.timeout(300)
async def test_a_host_of_eight_ranks_moves_and_another_is_lost(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """A stage moves, by live shadow; stayers open links only to ranks that moved, in common groups.
    The lost host held the other stage, which no standby has built."""
    (tmp_path / "golden").mkdir()
    golden = golden_of(tmp_path / "golden", ("eight", *LONG), RANKS, script("eight"))
    async with running(
        tmp_path / "run",
        redis.url,
        faults=[PACE],
        arguments=("eight", *LONG),
        active=HOSTS,
        per_host=PER_HOST,
        script=script("eight"),
    ) as run:
        await run.reached("between")
        await run.cluster.until(lambda v: ready(v, RANKS, PER_HOST), "all train, two stand by")
        await run.cluster.drain("h2")
        moved = await run.done("drain")
        await run.cluster.until(lambda v: ready(v, RANKS, PER_HOST), "those of h2 stand by")
        stayers = (0, 1, 4, 5, 6, 7)
        links = {rank: opened(run, moved, rank) for rank in stayers}
        await run.cluster.undrain("h2")
        await run.lose("h3")
        lost = (await run.plans(2))[1]

        assert [m.rank for m in moved.moves] == [2, 3]
        assert moved.how == "live shadow"
        assert links == {rank: needed(rank, (2, 3)) for rank in stayers}
        assert (lost.kind, lost.phase) == (PlanKind.FAILOVER, Phase.DONE)
        assert [m.rank for m in lost.moves] == [4, 5]
        assert lost.rollback is None
        await run.ends_like(golden, lost=1)

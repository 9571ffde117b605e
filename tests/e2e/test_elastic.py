"""A job loses more ranks than it has standbys, and goes on with fewer workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import Struct

from tests.e2e.conftest import golden_of
from tests.e2e.harness import Run, history, live_plan, running, weights_of
from tests.marks import thorough
from tmd.core.planning.readiness import SHRUNK
from tmd.core.values.model import ClusterView, MigrationPlan, Phase, PlanKind
from tmd.demo.report import DemoTrace, gap_s, read_trace
from tmd.embedded import EmbeddedRedis

SCRIPT = str(Path(__file__).parent / "scripts" / "elastic_script.py")
RANKS = ("h0", "h1", "h2", "h3")
STEPS = 112
TOLERANCE = 1e-4
"""Of losses near one. Four gradients summed in another order differ by some units in the last place
of float32, 1e-7 of their size. AdamW divides by the root of their squares, so that a parameter
differs by as much of its update; a hundred steps add that up, and what they amplify leaves room for
a factor of ten. One sample that is missing, or counts twice, changes a loss by 1e-2."""
Samples = dict[tuple[int, int], list[int]]
"""By step and rank."""


class Undisturbed(Struct, frozen=True):
    """The job without a loss."""

    trace: DemoTrace
    samples: Samples


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inner group does not carry the collectives of passes."""
    monkeypatch.setenv("TMD_CPU", "own")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("elastic")
    found = golden_of(folder, ("--steps", str(STEPS)), len(RANKS), SCRIPT)
    return Undisturbed(found.trace, drawn(folder / "trace"))


def drawn(folder: Path) -> Samples:
    """The samples of committed steps; each rank's of a step are drawn by one worker."""
    found: Samples = {}
    for file in folder.glob("*.samples"):
        for text in file.read_text().splitlines():
            line = json.loads(text)
            for rank, samples in line["samples"].items():
                key = line["step"], int(rank)
                assert key not in found, f"two workers have drawn for (step, rank) {key}"
                found[key] = samples
    return found


@asynccontextmanager
async def elastic(
    folder: Path,
    redis: EmbeddedRedis,
    *faults: str,
    slow: int = 0,
    arguments: Sequence[str] = (),
    more_config: str = "",
) -> AsyncIterator[Run]:
    """The job on four hosts, without a standby. The worker on host ``slow`` slows all down."""
    async with running(
        folder,
        redis.url,
        faults=[*faults, f"between@h{slow}:4=pace"],
        standby=(),
        active=RANKS,
        script=SCRIPT,
        arguments=("--steps", str(STEPS), *arguments),
        more_config=more_config,
    ) as run:
        yield run


async def shrunk(run: Run, *ranks: int) -> tuple[MigrationPlan, ...]:
    """The plans that were carried out, once these ranks are adopted and the job trains."""

    def adopted(view: ClusterView) -> bool:
        trains = bool(view.jobs) and live_plan(view) is None
        return trains and view.jobs[0].membership.adopted.keys() == set(ranks)

    view = await run.cluster.until(adopted, f"ranks {ranks} are adopted", 40)
    return tuple(p for p in history(view) if p.phase is Phase.DONE)


async def come_back(run: Run, *hosts: str) -> tuple[MigrationPlan, ...]:
    """Workers of ``hosts`` are started again; the plans that were carried out once the job has a
    worker for each rank."""
    before = len(history(await run.cluster.view()))
    for host in hosts:
        await run.cluster.launchers[host].wait()
        await run.cluster.start_launcher(host)

    def grown(view: ClusterView) -> bool:
        whole = bool(view.jobs) and not view.jobs[0].membership.adopted
        return whole and live_plan(view) is None and len(history(view)) > before

    view = await run.cluster.until(grown, "each rank has a worker of its own", 40)
    return tuple(p for p in history(view)[before:] if p.phase is Phase.DONE)


async def ends_like(run: Run, golden: Undisturbed, *lost: MigrationPlan) -> float:
    """Every rank commits every step with its own samples; losses agree, and weights are equal.

    ``lost``: by the losses of ranks, the first one first. Returns the largest difference of a loss.
    """
    run.let_go("between")
    codes = await run.cluster.finished(60)
    trace = read_trace(run.cluster.trace)
    here, there = trace.commits, golden.trace.commits
    assert here.keys() == there.keys()
    differences = [abs(_loss(here[key]) - _loss(there[key])) for key in there]
    before = [key for key in there if key[1] < (lost[0].resume or 0)]
    for plan in filter(lambda p: p.resume, lost):
        print(f"plan {plan.id}: {gap_s(trace, plan):.3f} s between two commits")
    print(f"largest difference of {len(differences)} losses: {max(differences):.2e}")

    assert all(_loss(here[key]) == _loss(there[key]) for key in before)
    assert max(differences) < TOLERANCE
    assert drawn(run.cluster.trace) == golden.samples
    weights = weights_of(run.cluster.trace)
    assert len(weights) == len(RANKS)
    assert len(set(weights.values())) == 1, weights
    assert set(codes.values()) == {0}
    return max(differences)


def _loss(line: dict[str, str]) -> float:
    return float.fromhex(line["loss"])


@pytest.mark.parametrize(
    "config", ["", thorough('[shadow]\nmirror = "gradients"\n')], ids=["usual", "gradients"]
)
async def test_a_rank_is_adopted_and_given_to_the_standby_that_comes(
    config: str, tmp_path: Path, redis: EmbeddedRedis, golden: Undisturbed
) -> None:
    """Training goes on at once; the global batch stays, and so does the stream of each rank. An
    adopted rank is always followed by its outputs."""
    async with elastic(tmp_path, redis, "backward@2:9=kill", more_config=config) as run:
        (lost,) = await shrunk(run, 2)
        (grown,) = await come_back(run, "h2")

        assert lost.new.adopted == {2: 3}
        assert [(m.rank, m.joiner) for m in lost.moves] == [(2, None)]
        assert (grown.kind, grown.cause) == (PlanKind.PLANNED, SHRUNK)
        assert grown.how == "live shadow of rank 1"
        await ends_like(run, golden, lost)


@pytest.mark.thorough
async def test_a_rank_is_adopted_in_the_very_first_step(
    tmp_path: Path, redis: EmbeddedRedis, golden: Undisturbed
) -> None:
    """No step comes before, so that losses agree up to the order of sums."""
    async with elastic(tmp_path, redis, "backward@2:0=kill") as run:
        (lost,) = await shrunk(run, 2)
        await come_back(run, "h2")

        assert lost.resume == 0
        await ends_like(run, golden, lost)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [(1, 2), (0, 3), (0, 1)])
async def test_two_of_four_are_lost_in_one_step(
    ranks: tuple[int, int], tmp_path: Path, redis: EmbeddedRedis, golden: Undisturbed
) -> None:
    """Each survivor computes for two ranks, also for rank 0, which prints and saves."""
    first, second = ranks
    faults = [f"backward@{first}:9=kill", f"forward@{second}:9=kill"]
    stays = min({0, 1, 2, 3} - {*ranks})
    async with elastic(tmp_path, redis, *faults, slow=stays) as run:
        plans = await shrunk(run, *ranks)
        grown = await come_back(run, *(f"h{rank}" for rank in ranks))

        assert len(set(plans[-1].new.adopted.values())) == 2
        assert {p.kind for p in grown} == {PlanKind.PLANNED}
        await ends_like(run, golden, plans[0])


@pytest.mark.thorough
@pytest.mark.parametrize("point", ["backward@3", "before-vote@h3"])
async def test_one_that_has_adopted_a_rank_is_lost_as_well(
    point: str, tmp_path: Path, redis: EmbeddedRedis, golden: Undisturbed
) -> None:
    """In its pass for the one rank, or at the vote after its pass for the other."""
    async with elastic(tmp_path, redis, "forward@2:9=kill", f"{point}:12=kill") as run:
        first, second = await shrunk(run, 2, 3)
        await come_back(run, "h2", "h3")

        assert first.new.adopted == {2: 3}
        assert second.new.adopted == {2: 0, 3: 1}
        await ends_like(run, golden, first, second)


@pytest.mark.thorough
async def test_one_is_left_and_computes_for_all(
    tmp_path: Path, redis: EmbeddedRedis, golden: Undisturbed
) -> None:
    """And the last one to come back finds it so."""
    faults = ["backward@1:9=kill", "forward@2:9=kill", "before-vote@h3:12=kill"]
    async with elastic(tmp_path, redis, *faults) as run:
        plans = await shrunk(run, 1, 2, 3)
        await come_back(run, "h1", "h2", "h3")

        assert plans[-1].new.adopted == {1: 0, 2: 0, 3: 0}
        await ends_like(run, golden, plans[0])


@pytest.mark.thorough
async def test_a_script_whose_steps_cannot_be_shared_holds(
    tmp_path: Path, redis: EmbeddedRedis, golden: Undisturbed
) -> None:
    """By name; the standby that comes takes the rank as ever, and all bits are equal."""
    async with elastic(tmp_path, redis, "backward@2:9=kill", arguments=["--rigid"]) as run:
        view = await run.cluster.until(
            lambda v: bool(v.jobs and v.jobs[0].detail), "the job says why it holds"
        )
        (taken,) = await come_back(run, "h2")

        assert "no other rank can compute for it: its script calls reduce" in view.jobs[0].detail
        assert taken.moves[0].joiner is not None
        assert await ends_like(run, golden, taken) == 0.0

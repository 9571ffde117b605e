"""Runs a small job on a real cluster with faults, and compares it with the golden run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from tmd.campaign.environment import ORDERS
from tmd.campaign.forking import fork_server
from tmd.core.planning.survival import LossOutlook, survival
from tmd.core.values.model import (
    FINAL,
    Activity,
    ClusterView,
    MigrationPlan,
    Phase,
    Rehearsal,
    WorkerStatus,
)
from tmd.demo.cluster import ClusterSpec, LocalCluster, ready, workers
from tmd.demo.report import DemoTrace, committed_twice, may_miss, read_trace
from tmd.demo.story import run_golden
from tmd.testing.clients import until

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tmd" / "campaign" / "job.py")
RANKS = ("h1", "h2", "h3")
STEPS = 40
LONG = ("--steps", "150")
EPOCHS = ("--steps", "10", "--epochs", "4")
GATE = "forward@1:5=wait"
"""All ranks wait here, so that the job still runs when a request is made."""
PACE = "between@0:3=pace"
"""From here on rank 0 slows all ranks down until a fact has come."""
PACE_OF_2 = "between@2:3=pace"
"""The same by rank 2: a worker whose rank 0 has moved away slows nobody down."""
CRAWL = "between@0:3=crawl"
"""The same for a job that reaches a gate or a fault after few steps: a plan needs steps, too."""
HOT = "[shadow]\nhot = 1\n"
"""One rank has a hot standby."""
NEVER_SENT = "sending@*:*=kill"
"""A source that sends the tensors of a state dies."""
STOP_AND_COPY = "[shadow]\nenabled = false\n"
"""No live shadow: a joiner is ready while the job waits at its gate."""
RUNNER = ("-m", "tmd.integrations.auto")
"""What ``tmd launch --auto`` makes of its command: :func:`tmd.command.attached`."""

_prefixes: list[tuple[str, ...]] = [()]
"""Prefixes of the command of a process that is started by fork, the innermost last."""


@contextmanager
def forked(**options: Any) -> Iterator[tuple[str, ...]]:
    """Start launchers and workers by fork in this context. ``options``: as of ``fork_server``."""
    with fork_server(**options) as prefix:
        _prefixes.append(prefix)
        try:
            yield prefix
        finally:
            _prefixes.pop()


class Golden(Struct, frozen=True):
    """The results of an undisturbed run: the oracle."""

    trace: DemoTrace
    weights: dict[str, str]


def weights_of(folder: Path, kind: str = "weights") -> dict[str, str]:
    """Digest of the final weights by rank; with "shadow" those of standbys that shadowed it."""
    found = sorted(folder.glob(f"{kind}-*"))
    return {f.name.replace(kind, "weights"): f.read_text() for f in found}


async def make_golden(
    folder: Path,
    arguments: Sequence[str] = (),
    ranks: int = len(RANKS),
    script: str = SCRIPT,
    runner: Sequence[str] = (),
) -> Golden:
    """Run the job without tmd's control plane."""
    command = (*runner, script, "--steps", str(STEPS), *arguments)
    await run_golden(command, ranks, folder / "trace", folder / "log", _prefixes[-1])
    return Golden(read_trace(folder / "trace"), weights_of(folder / "trace"))


class Run:
    """One disturbed run."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self._killed: set[int] = set()

    def fired(self, point: str) -> bool:
        """Whether the fault at ``point`` was reached."""
        return (self.folder / f"{point}.fired").exists()

    def order(self, fault: str) -> None:
        """Order one more fault, for a process that is known only once the job runs."""
        draft = self.folder / "orders.new"
        draft.write_text(fault)
        draft.replace(self.folder / ORDERS)

    async def reached(self, point: str) -> None:
        """Wait until a process is at ``point``; needs no Redis."""
        await until(lambda: self.fired(point), within_s=60, every_s=0.005)

    def let_go(self, point: str) -> None:
        """Release the processes that wait at ``point``."""
        (self.folder / f"{point}.go").touch()

    async def at_gate(self, standbys: int = 1) -> None:
        """Wait until the job is at its gate and the standbys wait."""
        await self.reached("forward")
        await self.cluster.until(
            lambda v: ready(v, len(RANKS), standbys), "all train, the standby waits"
        )

    async def drain_at_gate(self, standbys: int = 1, *, leave: bool = False) -> None:
        """Request the drain of rank 1's host; the job stays at its gate until released."""
        await self.at_gate(standbys)
        await self.cluster.drain("h2", leave=leave)

    async def in_phase(self, phase: Phase) -> ClusterView:
        """Wait until the live plan is in ``phase``."""
        return await self.cluster.until(
            lambda v: (p := live_plan(v)) is not None and p.phase is phase, f"phase {phase}"
        )

    async def armed(self) -> ClusterView:
        """Wait until every rank would switch at its next step boundary.

        READY alone is the leader's decision: the directive to arm may not have reached a trainer
        yet, or may be lost with a leader, while a released job runs to its end.
        """

        def ready_to_switch(view: ClusterView) -> bool:
            plan = live_plan(view)
            ranks = [w for w in workers(view) if w.activity is Activity.TRAINING]
            return (
                plan is not None
                and plan.phase is Phase.READY
                and len(ranks) == view.jobs[0].world_size
                and all(w.plan == plan.id and w.armed for w in ranks)
            )

        return await self.cluster.until(ready_to_switch, "every rank is armed")

    async def rehearsed(self, standbys: int) -> list[tuple[WorkerStatus, Rehearsal]]:
        """All verdicts, once there are ``count``."""
        view = await self.cluster.until(
            lambda v: sum(bool(w.rehearsed) for w in workers(v)) == standbys,
            f"{standbys} standbys have rehearsed",
        )
        return [(w, verdict) for w in workers(view) for verdict in w.rehearsed]

    async def shadowed(self) -> ClusterView:
        """Wait until a standby shadows a rank with equal digests."""
        return await self.cluster.until(
            lambda v: any(w.shadow and w.shadow.verified for w in workers(v)), "a hot standby"
        )

    async def plans(self, count: int) -> tuple[MigrationPlan, ...]:
        """The first ``count`` final plans, once they exist."""
        view = await self.cluster.until(
            lambda v: len(history(v)) >= count, f"{count} plans are final", 40
        )
        return history(view)

    async def done(self, cause: str = "") -> MigrationPlan:
        """The first plan (of that cause) that was carried out."""

        def found(view: ClusterView) -> list[MigrationPlan]:
            return [p for p in history(view) if p.phase is Phase.DONE and p.cause.startswith(cause)]

        view = await self.cluster.until(lambda v: bool(found(v)), f"a plan {cause} is done", 40)
        return found(view)[0]

    async def lost_before_a_step(self, lost: str, *others: str) -> MigrationPlan:
        """All ranks wait at gates. The rank at the gate ``lost`` is let go into a fault, the others
        once the loss is known, and a standby is ready. Returns the plan that replaces the rank."""
        for gate in (lost, *others):
            await self.reached(gate)
        await self.cluster.until(
            lambda v: any(w.activity is Activity.STANDBY for w in workers(v)), "one stands by"
        )
        self.let_go(lost)
        await self.cluster.until(lambda v: live_plan(v) is not None, "the loss is known")
        for gate in others:
            self.let_go(gate)
        return await self.done()

    async def drain_rank_0(self) -> MigrationPlan:
        """Drain the host of rank 0, which stands by afterwards, while the job is slowed down."""
        await self.reached("between")
        await self.cluster.drain("h1", soft=True)
        return await self.done("drain")

    async def drain_and_loss(self) -> tuple[list[int], list[int]]:
        """Drain rank 0, then let the job run into a fault; returns the ranks moved by each."""
        drained = await self.drain_rank_0()
        self.let_go("between")
        self.let_go("forward")
        lost = await self.done("trainer")
        return [m.rank for m in drained.moves], [m.rank for m in lost.moves]

    async def drain_and_kill(self) -> tuple[list[int], list[int]]:
        """Drain the host of rank 0, then kill rank 1; returns the ranks moved by each.

        For a script without points for faults: it must have steps left after both.
        """
        await self.cluster.until(
            lambda v: any(w.step >= 2 for w in workers(v) if w.activity is Activity.TRAINING),
            "the job trains",
        )
        await self.cluster.drain("h1", soft=True)
        drained = await self.done("drain")
        await self.cluster.undrain("h1")
        await self.cluster.until(
            lambda v: survival(v, v.jobs[0]).outlook in (LossOutlook.SURVIVES, LossOutlook.LIKELY),
            "a standby is there, and each state exists twice",
        )
        await self.kill(1)
        lost = await self.done("trainer")
        return [m.rank for m in drained.moves], [m.rank for m in lost.moves]

    async def lose(self, host: str) -> None:
        """Kill all processes of ``host``, wherever in their steps its ranks are."""
        lost = [
            w.rank for w in workers(await self.cluster.view()) if w.worker.startswith(f"{host}/")
        ]
        self._killed.update(rank for rank in lost if rank is not None)
        await self.cluster.lose(host)

    async def kill(self, rank: int) -> None:
        """Kill -9 the worker of a rank, wherever in its step it is."""
        (victim,) = [w for w in workers(await self.cluster.view()) if w.rank == rank]
        self._killed.add(rank)
        os.kill(victim.pid, signal.SIGKILL)

    async def _may_be_unwritten(self) -> set[tuple[int, int]]:
        """(rank, step) that a rank may have committed before :meth:`kill` or :meth:`lose` without a
        line."""
        lawful = may_miss(history(await self.cluster.view())) if self._killed else set()
        return {(rank, step) for rank, step in lawful if rank in self._killed}

    async def ends_like(
        self, golden: Golden, *, lost: int = 0, unwritten: Collection[tuple[int, int]] = ()
    ) -> None:
        """The job ends with the golden numbers.

        ``lost``: how many launchers saw a worker fail. ``unwritten``: (rank, step) that may be
        missing since the rank died at a point between its commit and the trace. Nothing holds
        the job up from here on.
        """
        self.let_go("between")
        unwritten = {*unwritten, *await self._may_be_unwritten()}
        codes = await self.cluster.finished(60)
        trace = read_trace(self.cluster.trace)
        wrong = trace.differing(golden.trace)
        missing = golden.trace.commits.keys() - trace.commits.keys() - unwritten
        plans = history(await self.cluster.view()) if trace.earlier else ()
        twice = committed_twice(trace, plans)

        assert wrong == [], f"{len(wrong)} losses differ, first (step, rank) {wrong[:6]}"
        assert not missing, f"steps never committed: {sorted(missing)[:6]}"
        assert not twice, "; ".join(str(each) for each in twice)
        weights, shadows = (weights_of(self.cluster.trace, kind) for kind in ("weights", "shadow"))
        assert weights == golden.weights, f"{weights} instead of {golden.weights}"
        assert shadows.items() <= golden.weights.items(), f"{shadows} of {golden.weights}"
        assert len([c for c in codes.values() if c != 0]) == lost, codes


def history(view: ClusterView) -> tuple[MigrationPlan, ...]:
    """Final plans of the job."""
    return view.jobs[0].history if view.jobs else ()


def live_plan(view: ClusterView) -> MigrationPlan | None:
    """The live plan."""
    plan = view.jobs[0].plan if view.jobs else None
    return plan if plan is not None and plan.phase not in FINAL else None


@asynccontextmanager
async def running(
    folder: Path,
    redis: str,
    *,
    faults: Sequence[str] = (),
    standby: Sequence[str] = ("s1",),
    more_config: str = "",
    own_config: dict[str, str] | None = None,
    arguments: Sequence[str] = (),
    silence_s: float = 5.0,
    max_restarts: int = 0,
    rehearse: bool = False,
    active: Sequence[str] = RANKS,
    per_host: int = 1,
    script: str = SCRIPT,
    runner: Sequence[str] = (),
    prefix: Sequence[str] = (),
) -> AsyncIterator[Run]:
    """A cluster that runs the small job; all output is shown if a test fails.

    ``rehearse``: whether standbys rehearse without a request. Off, so that a fault for a joiner
    does not strike in a rehearsal. ``runner``: a module that runs the script.
    """
    marks = folder / "faults"
    await asyncio.to_thread(marks.mkdir, parents=True)
    spec = ClusterSpec(
        folder=folder,
        redis=redis,
        job="small",
        active=tuple(active),
        per_host=per_host,
        prefix=tuple(prefix) or _prefixes[-1],
        standby=tuple(standby),
        script=(*runner, script, "--steps", str(STEPS), *arguments),
        silence_s=silence_s,
        max_restarts=max_restarts,
        restart_delay_s=0.0,
        more_config=more_config,
        own_config=own_config or {},
        environment={
            "TMD_FAULTS": ",".join(faults),
            "TMD_FAULTS_FOLDER": str(marks),
            "TMD_SHADOW__REHEARSE": str(rehearse).lower(),
        },
    )
    async with LocalCluster(spec) as cluster:
        try:
            yield Run(cluster, marks)
        except BaseException:
            hosts = (*spec.active, *spec.standby)
            print("\n".join(f"==== {h}\n{cluster.log(h)[-6000:]}" for h in hosts))
            raise

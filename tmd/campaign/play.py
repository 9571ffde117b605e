"""Plays one scenario on a stage and records the observations, without a judgement."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from msgspec import Struct

from tmd.campaign.faults import KINDS
from tmd.campaign.judge import Observed, expected, word
from tmd.campaign.kind import Mend
from tmd.campaign.scenario import Expected, FaultPart, Scenario
from tmd.campaign.stage import CampaignStage, now
from tmd.campaign.view_checks import live_plan
from tmd.core.values.errors import StoreUnavailable, TmdError
from tmd.core.values.model import FINAL, Alert, ClusterView, MigrationPlan, State
from tmd.core.values.reasons import in_words
from tmd.demo.cluster import workers

START_S = 120.0
"""Longest wait for a cluster that was just started."""
AFTER = 5
"""Steps that all ranks commit at the end of a scenario."""
UNAFFECTED = 15
"""Steps without an event, where no plan is expected."""


FAILURES = (TimeoutError, OSError, RuntimeError, TmdError)
"""Errors of a cluster that breaks, or of a fault that does not happen."""


class NotWhole(TmdError):
    """The cluster was not whole in time."""


async def begun(stage: CampaignStage, scenario: Scenario) -> None:
    """Wait until ``scenario`` can be played.

    Raises:
        NotWhole: the wait was too long.
        RuntimeError: the cluster has ended.
    """
    limit = max(START_S, scenario.within_s)
    try:
        async with asyncio.timeout(limit):
            await stage.whole(scenario.standbys)
    except TimeoutError:
        late = f"the cluster was not whole within {limit:g} s"
        raise NotWhole(f"{late}\n{await stage.describe()}") from None


class Before(Struct, frozen=True):
    """The situation at the start of a scenario."""

    plans: frozenset[str]
    alerts: frozenset[str]
    epoch: int
    step: int
    leader: str


class Play:
    """One scenario; :meth:`run` once."""

    def __init__(self, stage: CampaignStage, scenario: Scenario, name: str) -> None:
        self._stage = stage
        self._scenario = scenario
        self._name = name
        self._mends: list[Mend] = []
        self._fired: list[float] = []
        self._held: list[str] = []
        self._plans: dict[str, MigrationPlan] = {}
        self._exits: dict[str, float] = {}
        self._before: Before

    async def run(self) -> Observed:
        """Play it; failures are part of the observations."""
        scenario, began, trouble = self._scenario, time.monotonic(), ""
        try:
            await begun(self._stage, scenario)
            self._before = await self._look()
        except FAILURES as error:
            return self._unplayed(await self._explain(error), time.monotonic() - began)
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.timeout(scenario.within_s):
                await self._strike()
                self._release()
                await self._mended()
                await self._outcome()
        except FAILURES as error:
            trouble = await self._explain(error)
        try:
            async with asyncio.timeout(scenario.within_s):
                await self._put_right()
        except FAILURES as error:
            trouble = trouble or await self._explain(error)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return await self._observed(trouble, time.monotonic() - began)

    async def _strike(self) -> None:
        meant = [await self._stage.resolved(fault) for fault in self._scenario.faults]
        faults = [(f"{self._name}.{n}", f) for n, f in enumerate(meant)]
        # Traps first, in reverse order: each must be set before the fault that leads into it.
        for name, fault in reversed(faults):
            if inside := KINDS[fault.kind].inside:
                self._stage.order(name, fault, inside)
        for name, fault in faults:
            kind = KINDS[fault.kind]
            await self._moment(fault)
            if kind.act is None:
                self._fired.append(await self._stage.fired(name))
                self._held.append(name)
                continue
            at = now()
            mend = await kind.act(self._stage, fault)
            self._mends.append(mend)
            if name == faults[-1][0]:
                self._release()
            if kind.met is not None:
                await kind.met(self._stage, fault)
            self._fired.append(at)
            if fault.for_s or fault.until:
                await self._lasts(fault)
                await mend()

    def _release(self) -> None:
        """Release processes that were held while others were struck."""
        for name in self._held:
            self._stage.release(name)

    async def _mended(self) -> None:
        phase = self._scenario.mended
        if phase:
            await self._stage.until(
                lambda v: (p := live_plan(v)) is not None and p.phase.value == phase
            )
            await self._mend()

    async def _mend(self) -> None:
        for mend in reversed(self._mends):
            await mend()
        await self._stage.repair()

    async def _moment(self, fault: FaultPart) -> None:
        phase = fault.phase
        if phase is not None:
            await self._stage.until(lambda v: (p := live_plan(v)) is not None and p.phase is phase)

    async def _lasts(self, fault: FaultPart) -> None:
        stage, wanted = self._stage, fault.plans or len(self._scenario.expect.plans)
        await asyncio.sleep(fault.for_s)
        if fault.steps:
            await stage.steps(fault.steps)
        elif fault.until == "a plan":
            await stage.until(lambda v: live_plan(v) is not None or bool(self._ended(v)))
        elif fault.plans or fault.until == "done":
            await stage.until(lambda v: len(self._ended(v)) >= wanted)
        elif fault.until == "silence":
            await stage.until(lambda v: len(v.hosts) < len(stage.hosts))
        elif fault.until == "another leader":
            await self._another_leader()

    async def _another_leader(self) -> None:
        async for _ in self._stage.cluster.views():
            with contextlib.suppress(StoreUnavailable):
                if await self._stage.cluster.leader() not in ("", self._before.leader):
                    return

    async def _outcome(self) -> None:
        """Wait for the end of the expected plans, or for further training."""
        if self._scenario.expect.plans:
            await self._stage.until(lambda v: len(self._counted(v)) >= len(self._expected(v).plans))
        else:
            await self._stage.steps(UNAFFECTED)

    async def _put_right(self) -> None:
        self._stage.withdraw()
        self._release()
        # First, since workers restarted on a drained host would leave at once.
        await self._stage.undrain()
        await self._mend()
        await self._stage.whole(self._scenario.standbys)
        await self._stage.steps(AFTER)
        await self._stage.whole(self._scenario.standbys)

    # --- observation ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Collect facts that may be forgotten before the end: plans, and the workers' exits."""
        async for view in self._stage.cluster.views():
            self._note(view)

    def _note(self, view: ClusterView) -> None:
        self._plans.update((plan.id, plan) for plan in self._ended(view))
        for host in view.hosts:
            self._exits.update((e.worker, e.at) for e in host.exits)

    def _ended(self, view: ClusterView) -> Sequence[MigrationPlan]:
        history = view.jobs[0].history if view.jobs else ()
        return [p for p in history if p.phase in FINAL and p.id not in self._before.plans]

    def _expected(self, view: ClusterView) -> Expected:
        return expected(self._scenario, self._ended(view))

    def _counted(self, view: ClusterView) -> Sequence[MigrationPlan]:
        """Plans that are required or forbidden, without those that are merely allowed."""
        expect = self._expected(view)
        merely = set(expect.may) - set(expect.plans)
        return [p for p in self._ended(view) if word(p) not in merely]

    async def _look(self) -> Before:
        view = await self._stage.until(lambda v: bool(v.jobs))
        job = view.jobs[0]
        self._stage.raised.update(a.id for a in await self._alerts())
        return Before(
            plans=frozenset(p.id for p in job.history),
            alerts=frozenset(self._stage.raised),
            epoch=job.membership.epoch,
            step=max(w.step for w in workers(view)),
            leader=await self._stage.cluster.leader(),
        )

    async def _alerts(self) -> list[Alert]:
        with contextlib.suppress(StoreUnavailable):
            return [a for a in await self._stage.cluster.alerts() if a.state is State.RAISED]
        return []

    async def _explain(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            fired = f"{len(self._fired)} of {len(self._scenario.faults)} faults had fired"
            limit = f"not finished within {self._scenario.within_s:g} s, {fired}"
            return f"{limit}\n{await self._stage.describe()}"
        return f"{type(error).__name__}: {in_words(error)}"

    def _unplayed(self, trouble: str, seconds: float) -> Observed:
        kinds = tuple(f.kind for f in self._scenario.faults)
        return Observed(self._scenario.name, kinds, trouble=trouble, seconds=seconds)

    async def _observed(self, trouble: str, seconds: float) -> Observed:
        view = ClusterView()
        with contextlib.suppress(StoreUnavailable):
            view = await self._stage.cluster.view()
            self._note(view)
        job = view.jobs[0] if view.jobs else None
        plans = sorted(self._plans.values(), key=lambda p: p.timeline[0].at if p.timeline else 0.0)
        new = {a.id: a for a in await self._alerts() if a.id not in self._before.alerts}
        self._stage.raised.update(new)
        return Observed(
            scenario=self._scenario.name,
            kinds=tuple(f.kind for f in self._scenario.faults),
            fired=tuple(self._fired),
            trouble=trouble,
            plans=tuple(plans),
            alerts=tuple(new.values()),
            epochs=(self._before.epoch, job.membership.epoch if job else self._before.epoch),
            steps=(self._before.step, max((w.step for w in workers(view)), default=0)),
            noticed={p.id: self._exits[w] for p in plans for w in p.dead if w in self._exits},
            seconds=seconds,
        )

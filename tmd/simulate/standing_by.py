"""tmd, with warm or hot standbys: what the plans of the real planner cost in time."""

from __future__ import annotations

from tmd.core.values.model import JobState, Phase, PlanKind
from tmd.simulate.cluster import SimulatedCluster
from tmd.simulate.costs import Costs
from tmd.simulate.values import (
    Cause,
    Fault,
    FaultScope,
    LostWork,
    NextPhase,
    Warned,
    WorkDone,
    holding,
    restarting,
    unsaved,
)

FIRST = 2
"""From this step on the planner treats a job as one that trains."""


class StandingBy:
    """A standby takes over each rank that is lost."""

    def __init__(self, cluster: SimulatedCluster, costs: Costs) -> None:
        self._cluster, self._costs = cluster, costs
        self._stands: Cause | None = None
        """Why the job stands still; ``None`` while it trains."""
        self._move = ("", 0.0)
        """The latest planned move, and when its joiners are ready."""
        cluster.decide(FIRST, 0.0)

    def at(self, place: int) -> str | None:
        places = self._cluster.places
        return places[place] if place < len(places) else None

    def has(self, host: str) -> bool:
        return self._cluster.has(host)

    def warned(self, host: str, how: Warned, now: float, work: WorkDone) -> NextPhase | None:
        if how is Warned.DRAIN:
            self._cluster.drain(host)
        else:
            self._cluster.degrade(host, now)
        return self._looked(now, work) if self._stands is None else None

    def lost(self, host: str, fault: Fault, now: float, work: WorkDone) -> NextPhase | None:
        needed = self._cluster.needs(host)
        if fault.scope is FaultScope.WORKER:
            self._cluster.end_worker(host)
        else:
            self._cluster.remove(host)
        if self._begins_anew:
            return self._restarted(now, ()) if needed else None
        if needed:
            return self._recovered(now, work)
        return self._looked(now, work) if self._stands is None else None

    def crashed(self, now: float, work: WorkDone) -> NextPhase | None:
        return self._restarted(now, unsaved(work))

    def came(self, host: str, now: float, work: WorkDone) -> NextPhase | None:
        if self._cluster.runs(host):
            return None  # its worker has started with all others
        self._cluster.add(host)
        if self._stands is Cause.HOLD:
            return self._restarted(now, ()) if self._begins_anew else self._recovered(now, work)
        return self._looked(now, work) if self._stands is None else None

    def proceed(self, now: float, work: WorkDone) -> NextPhase | None:
        if self._stands is None:
            return self._prepared(now, work) or self._looked(now, work)
        plan = self._cluster.plan
        if plan is not None and plan.kind is PlanKind.FAILOVER:
            self._cluster.sync(now)
        self._stands = None
        return self._looked(now, work)

    # --- decisions --------------------------------------------------------------------------------

    @property
    def _begins_anew(self) -> bool:
        """Whether the job starts from a checkpoint, or waits for hosts to do so."""
        return self._stands in (Cause.RESTART, Cause.HOLD) and self._cluster.plan is None

    def _recovered(self, now: float, work: WorkDone) -> NextPhase:
        """The planner's answer to a loss."""
        self._cluster.halt(work.steps, now)
        record, plan = self._cluster.record, self._cluster.plan
        if record.state is JobState.FAILED:
            return self._restarted(now, unsaved(work))
        interrupted = (LostWork(Cause.INTERRUPTED_STEP, work.in_step_s),)
        if plan is None or plan.phase is not Phase.SYNC:
            self._stands = Cause.HOLD
            return NextPhase(cause=Cause.HOLD, losses=interrupted)
        joiners = [(m.rank, m.joiner) for m in plan.moves if m.joiner is not None]
        hot = all(self._cluster.follows(joiner.host, rank) for rank, joiner in joiners)
        self._stands = Cause.FAILOVER
        if hot and plan.rollback is None:  # the step goes on
            return NextPhase(self._costs.hot_s, Cause.FAILOVER)
        back = (work.steps - (plan.resume or 0)) * self._costs.step_s
        repeated = LostWork(Cause.REPEATED_STEPS, max(0.0, back))
        return NextPhase(self._costs.warm_s, Cause.FAILOVER, (*interrupted, repeated))

    def _restarted(self, now: float, losses: tuple[LostWork, ...]) -> NextPhase:
        enough = self._cluster.restart()
        self._stands = Cause.RESTART if enough else Cause.HOLD
        if not enough:
            return holding(losses)
        return restarting(self._costs.restart_s, losses)

    def _looked(self, now: float, work: WorkDone) -> NextPhase:
        """The job trains; the leader looks, and may open a planned move."""
        self._cluster.decide(work.steps + FIRST, now)
        plan = self._cluster.plan
        if plan is None or plan.phase is not Phase.PREPARE:
            # The breaker closes only after that time, not at it.
            return NextPhase(self._cluster.paused_s + 1.0)
        if plan.id != self._move[0]:
            self._move = (plan.id, now + self._costs.prepare_s)
        return NextPhase(max(0.0, self._move[1] - now))

    def _prepared(self, now: float, work: WorkDone) -> NextPhase | None:
        """The joiners of a planned move are ready."""
        if not self._cluster.switch(work.steps + FIRST, now):
            return None
        self._stands = Cause.PLANNED_MOVE
        return NextPhase(self._costs.move_s, Cause.PLANNED_MOVE)

"""The phases of a migration: one table, and the facts that move a plan through it.

Rules of this file: every legal transition is in ``TABLE``; an event that the table does not allow
raises and changes nothing; no function reads or writes stored plans.
docs/how/machines.md shows a diagram that is generated from the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from math import inf

from msgspec import structs

from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import (
    FINAL,
    Activity,
    ClusterView,
    Mark,
    Member,
    Membership,
    MigrationPlan,
    Move,
    Phase,
    PlanKind,
    Severity,
    Strategy,
    WorkerStatus,
)
from tmd.core.values.tables import next_state


class PlanEvent(StrEnum):
    """Events of a plan."""

    JOINERS_READY = "joiners ready"
    JOINER_LOST = "joiner lost or refused"
    MEMBER_REFUSED = "a member cannot switch"
    DEADLINE = "deadline"
    SWITCHED = "the vote switched"
    DISARMED = "all disarmed"
    COMMITTED = "joiner committed"
    HALTED = "survivors halted, owners settled"
    SYNCED = "all synced"
    MEMBER_LOST = "member lost"
    JOB_ENDED = "a rank came to the end of training"


PAUSED = "the cluster is paused: no plan is opened until 'tmd resume'"
"""What a job waits for whose planned move a pause holds."""
STOPPED = "the job stands still: the cluster is paused, and a failover waits for 'tmd resume'"
"""What it waits for if ranks are lost."""
TABLE: dict[Phase, dict[PlanEvent, Phase]] = {
    Phase.PREPARE: {
        PlanEvent.JOINERS_READY: Phase.READY,
        PlanEvent.JOINER_LOST: Phase.ABORTED,
        PlanEvent.DEADLINE: Phase.ABORTED,
        PlanEvent.MEMBER_LOST: Phase.ABORTED,
        PlanEvent.JOB_ENDED: Phase.ABORTED,
    },
    Phase.READY: {
        PlanEvent.SWITCHED: Phase.SWITCH,
        PlanEvent.JOINER_LOST: Phase.DISARM,
        PlanEvent.MEMBER_REFUSED: Phase.DISARM,
        PlanEvent.DEADLINE: Phase.DISARM,
        PlanEvent.MEMBER_LOST: Phase.ABORTED,
        PlanEvent.JOB_ENDED: Phase.ABORTED,
    },
    # Members are armed: the vote may still switch until every one has disarmed.
    Phase.DISARM: {
        PlanEvent.DISARMED: Phase.ABORTED,
        PlanEvent.SWITCHED: Phase.SWITCH,
        PlanEvent.MEMBER_LOST: Phase.ABORTED,
        PlanEvent.JOB_ENDED: Phase.ABORTED,
    },
    Phase.SWITCH: {
        PlanEvent.COMMITTED: Phase.DONE,
        PlanEvent.MEMBER_LOST: Phase.ABORTED,
        PlanEvent.JOB_ENDED: Phase.DONE,
    },
    Phase.RECOVER: {
        PlanEvent.HALTED: Phase.SYNC,
        PlanEvent.MEMBER_LOST: Phase.RECOVER,
        PlanEvent.JOB_ENDED: Phase.ABORTED,
    },
    Phase.SYNC: {
        PlanEvent.SYNCED: Phase.RESUME,
        PlanEvent.JOINER_LOST: Phase.RECOVER,
        PlanEvent.DEADLINE: Phase.RECOVER,
        PlanEvent.MEMBER_LOST: Phase.RECOVER,
        PlanEvent.JOB_ENDED: Phase.ABORTED,
    },
    # The change is committed: a new fault is a new failover in the new epoch.
    Phase.RESUME: {
        PlanEvent.COMMITTED: Phase.DONE,
        PlanEvent.MEMBER_LOST: Phase.DONE,
        PlanEvent.JOB_ENDED: Phase.DONE,
    },
    Phase.DONE: {},
    Phase.ABORTED: {},
}


def transition(
    plan: MigrationPlan, event: PlanEvent, now: float, outcome: str = ""
) -> MigrationPlan:
    """``plan`` after ``event``; ``now`` is only written down.

    Raises:
        IllegalTransition: the table has no such event in the plan's phase.
    """
    refusal = f"plan {plan.id}: '{event}' cannot happen in phase {plan.phase}"
    phase = next_state(TABLE, plan.phase, event, refusal)
    return structs.replace(
        plan, phase=phase, timeline=(*plan.timeline, Mark(phase, now)), outcome=outcome
    )


def is_live(plan: MigrationPlan | None) -> bool:
    """Whether ``plan`` is not final."""
    return plan is not None and plan.phase not in FINAL


class PlanFacts:
    """The facts about one job's workers in a cluster view; read-only."""

    def __init__(
        self, view: ClusterView, job: str, silences: Mapping[str, float] | None = None
    ) -> None:
        """``silences``: seconds for which the leader has heard nothing of workers without a
        report."""
        self.view = view
        self._silences = silences or {}
        self.status = view.workers(job)
        self._roles = {w.rank: w.role for w in self.status.values() if w.rank is not None}
        self._exits = view.exits(job)
        self._failed = {
            a.entity
            for a in view.findings(job)
            if a.severity is Severity.FATAL and a.strategy is Strategy.ACT
        }

    def exited(self, worker: str) -> int | None:
        """Exit status of a worker, once known."""
        known = self._exits.get(worker)
        return None if known is None else known.code

    def was_stopped(self, worker: str) -> bool:
        """Whether it has exited with status 0 because its launcher was stopped."""
        known = self._exits.get(worker)
        return known is not None and known.stopped

    def ending(self, workers: Iterable[str]) -> str:
        """The first of ``workers`` that is ending with a status not yet known; empty for none."""
        exits = (self._exits.get(w) for w in workers)
        return next((e.worker for e in exits if e is not None and e.code is None), "")

    def has_ended(self, worker: str) -> bool:
        """Whether it has ended, or is about to."""
        return worker in self._exits

    def failing(self, worker: str) -> bool:
        """Whether it has ended, or a detector that may act has found it unfit."""
        return worker in self._exits or worker in self._failed

    def silence(self, worker: str, unknown: float) -> float:
        """Seconds for which nothing has been heard of ``worker``, which has no report; ``unknown``
        if the leader does not know."""
        return self._silences.get(worker, unknown)

    def doing(self, worker: str, activity: Activity, plan: str) -> bool:
        """Whether ``worker`` reports ``activity`` for ``plan``."""
        status = self.status.get(worker)
        return status is not None and status.activity is activity and status.plan == plan

    def synced(self, worker: str, plan: MigrationPlan) -> bool:
        """Whether ``worker`` reports that it is ready for the resume step of ``plan``. A report of
        another step is of the plan as it was before it was reopened."""
        known = self.doing(worker, Activity.SYNCED, plan.id)
        return known and self.status[worker].step == plan.resume

    def stuck(self, membership: Membership) -> bool:
        """Whether a member waits for a plan; reports of an older epoch do not count."""
        members = [self.status.get(m.worker) for m in membership.members]
        return any(
            s is not None and s.activity is Activity.STUCK and s.epoch >= membership.epoch
            for s in members
        )

    def role(self, rank: int) -> str:
        """The role of ``rank`` as its holder reports it; empty if unknown."""
        return self._roles.get(rank, "")

    def epoch(self, worker: str) -> int:
        status = self.status.get(worker)
        return 0 if status is None else status.epoch


def planned_event(
    plan: MigrationPlan, facts: PlanFacts, age: float, limits: PlanLimits
) -> tuple[PlanEvent, str] | None:
    """The event that has happened to a PLANNED ``plan``, with a reason; ``None`` for nothing yet.

    The loss of a member is handled elsewhere (:mod:`tmd.core.planning.failover`).
    """
    if plan.kind is not PlanKind.PLANNED:
        return None
    match plan.phase:
        case Phase.PREPARE:
            return _preparing(plan, facts, age, limits)
        case Phase.READY:
            if _switched(plan, facts):
                return PlanEvent.SWITCHED, ""
            lost = _joiner_trouble(plan, facts, age, limits)
            if lost:
                return PlanEvent.JOINER_LOST, lost
            if refused := _refusal(plan, facts):
                return PlanEvent.MEMBER_REFUSED, refused
            if age > limits.ready_s:
                return PlanEvent.DEADLINE, f"not switched within {limits.ready_s:g} s"
        case Phase.DISARM:
            if _switched(plan, facts):
                return PlanEvent.SWITCHED, ""
            if all(_disarmed(plan, facts, m.worker) for m in plan.old.members):
                return PlanEvent.DISARMED, plan.outcome
        case Phase.SWITCH:
            if all(has_committed(facts, m.joiner.worker, plan) for m in plan.moves if m.joiner):
                return PlanEvent.COMMITTED, ""
    return None


def failover_event(
    plan: MigrationPlan, facts: PlanFacts, age: float, limits: PlanLimits
) -> tuple[PlanEvent, str] | None:
    """The event that has happened to a FAILOVER ``plan`` in SYNC or RESUME, with a reason."""
    if plan.kind is not PlanKind.FAILOVER:
        return None
    members = [m.worker for m in plan.new.members]
    if plan.phase is Phase.SYNC:
        if all(facts.synced(w, plan) for w in members):
            return PlanEvent.SYNCED, ""
        lost = _joiner_trouble(plan, facts, age, limits)
        if lost:
            return PlanEvent.JOINER_LOST, lost
        if age > limits.sync_s:
            return PlanEvent.DEADLINE, f"not synced within {limits.sync_s:g} s"
    if plan.phase is Phase.RESUME:
        joiners = [m.joiner.worker for m in plan.moves if m.joiner] or members
        if all(has_committed(facts, w, plan) for w in joiners):
            return PlanEvent.COMMITTED, ""
    return None


def how_prepared(plan: MigrationPlan, facts: PlanFacts) -> str:
    """How the joiners of ``plan`` get their state, in the order of its moves."""
    joiners = ((m, facts.status.get(m.joiner.worker)) for m in plan.moves if m.joiner)
    ways = dict.fromkeys(_how(move, status) for move, status in joiners if status)
    if why := plan.builds_at_switch:
        ways[f"inner groups are built at the switch, since {why}"] = None
    return "; ".join(ways)


def _how(move: Move, status: WorkerStatus) -> str:
    shadow = status.shadow
    if status.activity is not Activity.IN_STEP or shadow is None:
        return f"stop-and-copy: {status.detail}"
    how = "live shadow" if shadow.rank == move.rank else f"live shadow of rank {shadow.rank}"
    return f"{how}, {shadow.note}" if shadow.note else how


def troubled_joiners(
    plan: MigrationPlan, facts: PlanFacts, age: float, limits: PlanLimits
) -> tuple[str, ...]:
    """Joiners of ``plan`` that ended, fell silent or refused."""
    return tuple(_troubles(plan, facts, age, limits))


def unheard_joiners(plan: MigrationPlan, facts: PlanFacts) -> tuple[str, ...]:
    """Joiners of ``plan`` that have not ended as far as known, and of which nothing is heard: they
    may take a rank again once they report."""
    joiners = [m.joiner.worker for m in plan.moves if m.joiner]
    return tuple(w for w in joiners if w not in facts.status and not facts.failing(w))


def _preparing(
    plan: MigrationPlan, facts: PlanFacts, age: float, limits: PlanLimits
) -> tuple[PlanEvent, str] | None:
    lost = _joiner_trouble(plan, facts, age, limits)
    if lost:
        return PlanEvent.JOINER_LOST, lost
    joiners = [m.joiner.worker for m in plan.moves if m.joiner]
    if all(_ready(facts, w, plan) for w in joiners):
        return PlanEvent.JOINERS_READY, ""
    if age > limits.prepare_s:
        return PlanEvent.DEADLINE, f"joiner not prepared within {limits.prepare_s:g} s"
    return None


def _ready(facts: PlanFacts, worker: str, plan: MigrationPlan) -> bool:
    return any(facts.doing(worker, a, plan.id) for a in (Activity.IN_STEP, Activity.PREPARED))


def _trouble(
    plan: MigrationPlan, facts: PlanFacts, joiner: Member, age: float, limits: PlanLimits
) -> str:
    worker, status = joiner.worker, facts.status.get(joiner.worker)
    # A witness has the rank already. A finding about it is for policies, as with any other rank.
    has_rank = joiner in plan.witnesses
    if facts.has_ended(worker) if has_rank else facts.failing(worker):
        return f"joiner {worker} was lost"
    if status is None:
        patience = limits.silent_s if _may_come_back(plan, facts, joiner) else limits.unheard_s
        silent = facts.silence(worker, age) > patience
        return f"joiner {worker} is not heard from" if silent else ""
    if status.activity is Activity.REFUSED and status.plan == plan.id:
        return f"joiner {worker} refused: {status.detail}"
    return ""


def _may_come_back(plan: MigrationPlan, facts: PlanFacts, joiner: Member) -> bool:
    """Whether to wait for a joiner without a report: a restarted daemon does not know its workers
    yet. While training stands still no silent host is waited for longer than it takes all hosts
    to report after an outage of Redis."""
    return plan.kind is PlanKind.PLANNED or facts.view.host(joiner.host) is not None


def _troubles(
    plan: MigrationPlan, facts: PlanFacts, age: float, limits: PlanLimits
) -> dict[str, str]:
    """Joiners of ``plan`` that cannot continue it, with the reasons."""
    joiners = [m.joiner for m in plan.moves if m.joiner]
    found = {j.worker: _trouble(plan, facts, j, age, limits) for j in joiners}
    return {worker: why for worker, why in found.items() if why}


def _joiner_trouble(plan: MigrationPlan, facts: PlanFacts, age: float, limits: PlanLimits) -> str:
    return next(iter(_troubles(plan, facts, age, limits).values()), "")


def _switched(plan: MigrationPlan, facts: PlanFacts) -> bool:
    # One is enough: every rank that knows the result of a vote knows the same.
    # Of those that left only they themselves and their joiners know.
    parties = (*plan.old.members, *plan.new.members)
    return any(
        facts.epoch(m.worker) >= plan.new.epoch or facts.doing(m.worker, Activity.LEFT, plan.id)
        for m in parties
    )


def _refusal(plan: MigrationPlan, facts: PlanFacts) -> str:
    """Why a member cannot arm; empty if all have armed or may still."""
    for rank, member in enumerate(plan.old.members):
        status = facts.status.get(member.worker)
        if status is not None and status.plan == plan.id and not status.armed and status.detail:
            return f"rank {rank} cannot switch: {status.detail}"
    return ""


def _disarmed(plan: MigrationPlan, facts: PlanFacts, worker: str) -> bool:
    # By name, since a status from before the arms also reports "not armed".
    status = facts.status.get(worker)
    return status is not None and status.armed == 0 and status.plan == plan.id


def has_committed(facts: PlanFacts, worker: str, plan: MigrationPlan) -> bool:
    """Whether a member of the new epoch has committed a step in it. One whose daemon is silent has
    if any other member has: all of them vote on each step."""
    if (own := facts.status.get(worker)) is not None:
        return _has_advanced(own, plan, facts, unknown=0)
    others = (facts.status.get(member.worker) for member in plan.new.members)
    return any(_has_advanced(s, plan, facts, unknown=inf) for s in others if s is not None)


def _has_advanced(
    status: WorkerStatus, plan: MigrationPlan, facts: PlanFacts, *, unknown: float
) -> bool:
    """Whether ``status`` is of a later step than the first one of the new epoch. ``unknown``:
    what counts as that step if no worker or plan reports it, as in an earlier release."""
    if status.epoch < plan.new.epoch or status.activity is not Activity.TRAINING:
        return False
    begun: float | None = plan.resume if plan.resume is not None else status.entered
    if begun is None:
        left = [facts.status.get(m.leaver.worker) for m in plan.moves]
        steps = [s.step for s in left if s is not None and s.activity is Activity.LEFT]
        begun = max(steps, default=unknown)
    return status.step > begun


def with_timings(plan: MigrationPlan, facts: PlanFacts) -> MigrationPlan:
    """``plan`` with the longest of each time that its workers have reported."""
    timings = dict(plan.timings)
    for member in (*plan.old.members, *plan.new.members):
        status = facts.status.get(member.worker)
        if status is not None and status.plan == plan.id:
            for name, seconds in status.timings.items():
                timings[name] = max(seconds, timings.get(name, 0.0))
    return structs.replace(plan, timings=timings)

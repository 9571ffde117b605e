"""The answer to an operator's question: would the job survive the loss of a rank now?"""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import StrEnum

from msgspec import Struct

from tmd.core.planning.adoption import refusal
from tmd.core.planning.goodput import step_seconds
from tmd.core.planning.migration import PlanFacts, is_live
from tmd.core.planning.readiness import Readiness, readiness, unprotected
from tmd.core.planning.standbys import candidates, has_rehearsed, takes
from tmd.core.values.checkpoints import newest
from tmd.core.values.model import ClusterView, JobRecord, JobState, ShadowStatus, WorkerStatus
from tmd.core.values.shadows import ranges
from tmd.core.values.snapshots import newest_whole
from tmd.core.values.view_checks import left_alone

WorkerStatuses = Mapping[str, WorkerStatus]
"""Statuses by worker."""


class LossOutlook(StrEnum):
    """What the next loss would do to a job."""

    SURVIVES = "survives"  # a rehearsed standby takes any rank, and its state is there
    LIKELY = "likely"  # some rank depends on a standby that has not rehearsed it
    HALTS = "halts"  # the job would wait for an operator or a standby, or state would be lost
    MOVING = "moving"  # a plan is under way: the answer follows when it ends
    UNKNOWN = "unknown"  # a host or its heartbeat cannot be read
    ENDED = "ended"  # ranks are no longer replaced


class SnapshotAge(Struct, frozen=True):
    """The newest complete snapshot of a job."""

    step: int
    behind: int
    """Steps that a rollback to it repeats."""
    seconds: float
    """The time that these steps take."""


class Survival(Struct, frozen=True):
    """Whether a job would survive the loss of a rank now, and what that depends on."""

    outlook: LossOutlook
    sentence: str
    rehearsed: int = 0
    unrehearsed: int = 0
    unfit: int = 0
    hot: int = 0
    """Hot standbys that compute the same bits as their rank."""
    lag_s: float = 0.0
    """The largest lag of a hot standby behind its rank."""
    snapshot: SnapshotAge | None = None
    checkpoint: int | None = None
    """Step of the newest complete checkpoint."""


def survival(view: ClusterView, record: JobRecord) -> Survival:
    """The outlook of a job, by the latest reports."""
    known = view.workers(record.job)
    ready = readiness(view, record)
    hot = _hot(record, known)
    saved = newest(w.saved for w in known.values())
    snapshot = _snapshot(view, record, known)
    unique = _unique(record, known, hot)
    outlook, sentence = _outlook(view, record, known, ready, unique, snapshot)
    return Survival(
        outlook=outlook,
        sentence=sentence,
        rehearsed=ready.rehearsed,
        unrehearsed=ready.unrehearsed,
        unfit=ready.unfit,
        hot=len(hot),
        lag_s=max((shadow.lag_s for shadow in hot.values()), default=0.0),
        snapshot=snapshot,
        checkpoint=None if saved is None else saved.step,
    )


def _outlook(
    view: ClusterView,
    record: JobRecord,
    known: WorkerStatuses,
    ready: Readiness,
    unique: tuple[int, ...],
    snapshot: SnapshotAge | None,
) -> tuple[LossOutlook, str]:
    if record.state is not JobState.RUNNING:
        return LossOutlook.ENDED, f"the job is {record.state.value}: ranks are no longer replaced"
    if why := left_alone(record, view):
        return LossOutlook.UNKNOWN, f"nothing is decided about the job: {why}"
    plan = record.plan
    if plan is not None and is_live(plan):
        return LossOutlook.MOVING, f"plan {plan.id} is under way, in phase {plan.phase.value}"
    if view.paused:
        return LossOutlook.HALTS, "an operator has paused new plans: a loss waits for 'tmd resume'"
    if view.unread and ready.open_ranks:
        return LossOutlook.UNKNOWN, f"{', '.join(view.unread)} may have standbys: update tmd there"
    gap = unprotected(view, record)
    if gap is not None and not _goes_on_smaller(view, record, known):
        return LossOutlook.HALTS, gap.sentence
    silent = sorted({m.host for m in record.membership.members if m.worker not in known})
    if silent:
        return LossOutlook.UNKNOWN, f"no recent heartbeat reports the ranks on {', '.join(silent)}"
    if unique and snapshot is None:
        once = f"the state of {_ranks(unique)} exists only once, and no snapshot of it is complete"
        return (
            LossOutlook.HALTS,
            f"{once}: a loss takes the job back to its last checkpoint, or to its start",
        )
    if gap is not None:
        return LossOutlook.LIKELY, f"{gap.sentence}, but other ranks would compute for it"
    untried = _untried(view, record) if ready.rehearsed else ()
    return _with_standbys(ready, untried, unique, snapshot)


def _goes_on_smaller(view: ClusterView, record: JobRecord, known: WorkerStatuses) -> bool:
    """Whether other ranks would compute for a lost one."""
    members = [known[m.worker] for m in record.membership.members if m.worker in known]
    return record.world_size > 1 and refusal(view, members) == ""


def _with_standbys(
    ready: Readiness, untried: tuple[int, ...], unique: tuple[int, ...], age: SnapshotAge | None
) -> tuple[LossOutlook, str]:
    repeats = "another worker has the state of every rank"
    if unique and age is not None:
        steps = _number(age.behind, "step")
        repeats = f"a loss among {_ranks(unique)} repeats {steps}, {age.seconds:.1f} s"
    if not ready.rehearsed:
        standbys = _number(ready.unrehearsed, "standby")
        return (
            LossOutlook.LIKELY,
            f"{standbys} could take a rank, but none has rehearsed; {repeats}",
        )
    if untried:
        return LossOutlook.LIKELY, f"no standby has rehearsed {_ranks(untried)}; {repeats}"
    standbys = _number(ready.rehearsed, "rehearsed standby")
    return LossOutlook.SURVIVES, f"{standbys} could take a rank; {repeats}"


def _untried(view: ClusterView, record: JobRecord) -> tuple[int, ...]:
    """Ranks that no fit standby has rehearsed: the first one of each role."""
    facts = PlanFacts(view, record.job)
    spare = [m for m in candidates(view, record, facts) if m.worker in facts.status]
    # A job may have thousands of ranks and few roles; the answer is the same for a whole role.
    roles: dict[str | int, int] = {}
    for rank in range(record.world_size):
        roles.setdefault(facts.role(rank) or rank, rank)
    return tuple(
        rank
        for rank in roles.values()
        if not any(
            takes([m], rank, facts) and has_rehearsed(facts.status[m.worker], rank, facts)
            for m in spare
        )
    )


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"


def _hot(record: JobRecord, known: WorkerStatuses) -> dict[int, ShadowStatus]:
    """By rank, the hot standby that computes the same bits."""
    shadows = {u.rank: known.get(u.member.worker) for u in record.shadows if u.stay}
    return {
        rank: status.shadow
        for rank, status in shadows.items()
        if status is not None and status.shadow is not None
        if status.shadow.rank == rank and status.shadow.verified is not None
    }


def _unique(record: JobRecord, known: WorkerStatuses, hot: Container[int]) -> tuple[int, ...]:
    """Ranks whose state nobody else has. ``hot``: ranks that a hot standby follows."""
    statuses = ((r, known.get(m.worker)) for r, m in enumerate(record.membership.members))
    return tuple(r for r, w in statuses if w is not None and w.replicas == (r,) and r not in hot)


def _snapshot(view: ClusterView, record: JobRecord, known: WorkerStatuses) -> SnapshotAge | None:
    # A rank's own copy is lost with the rank, so only steps with a second copy count.
    step = newest_whole(record.world_size, (w.kept for w in known.values()), copies=2)
    if step is None:
        return None
    steps = [known[m.worker].step for m in record.membership.members if m.worker in known]
    behind = max(0, max(steps, default=step) - step)
    return SnapshotAge(step, behind, behind * step_seconds(record, view))

"""How a job ends: its workers end, none is known any more, or an operator gives it up."""

from __future__ import annotations

from msgspec import structs

from tmd.core.planning import failover
from tmd.core.planning.migration import PlanEvent, PlanFacts, is_live, transition, with_timings
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import ClusterView, JobRecord, JobState
from tmd.core.values.view_checks import ENDED

CUT_OFF = (
    "; if it still trains, its workers cannot reach their daemons ([host] users, rights of the "
    "folder of [host] socket): stop it, and start it again from its newest checkpoint"
)
"""What an operator may find behind a job of which no worker is known."""


def ended(record: JobRecord, facts: PlanFacts, now: float) -> JobRecord | None:
    """The record after the first worker, or the last one, has ended; ``None`` if none has."""
    workers = record.membership.workers
    codes = [facts.exited(w) for w in workers]
    if 0 not in codes:
        return None
    if record.state is JobState.RUNNING:
        if record.plan is not None and is_live(record.plan):
            # A worker that has ended training has committed every step, and so has every rank.
            over = transition(record.plan, PlanEvent.JOB_ENDED, now)
            record = failover.archived(record, with_timings(over, facts))
        return structs.replace(record, state=JobState.FINISHING, detail="")
    if None in codes:
        return None
    pairs = zip(workers, codes, strict=True)
    bad = [w for w, c in pairs if c != 0 and not facts.was_stopped(w)]
    if bad:
        detail = f"{', '.join(bad)} failed after the end of training"
        return structs.replace(record, state=JobState.FAILED, detail=detail, trained=True)
    return structs.replace(record, state=JobState.FINISHED, detail="")


def dated(record: JobRecord, now: float) -> JobRecord:
    """The next revision of the record of an ended job, with the time of its end; ``record`` itself
    if it has one. An operator, and a leader of an earlier release, do not write that time."""
    if record.ended_at:
        return record
    return structs.replace(record, ended_at=now, revision=record.revision + 1)


def may_be_unlisted(record: JobRecord, view: ClusterView, kept_s: float, now: float) -> bool:
    """Whether the job ended ``kept_s`` seconds ago, and no host reports a worker of it."""
    over = record.state in ENDED and 0 < record.ended_at <= now - kept_s
    return over and not view.workers(record.job)


def abandoned(
    record: JobRecord, view: ClusterView, facts: PlanFacts, age: float, limits: PlanLimits
) -> JobRecord | None:
    """The failed job if no worker is left: every member's host reports, and none knows its worker.

    A silent host proves nothing: the job may still train.
    """
    members, ends = list(record.membership.members), facts.failing
    trained = record.state is JobState.FINISHING
    detail, more = "no worker of the job has been known to its host", CUT_OFF
    if trained:
        members = [m for m in members if facts.exited(m.worker) is None]
        ends = facts.has_ended
        names = ", ".join(m.worker for m in members)
        detail, more = f"the exit status of {names} is unknown: no host has known it", ""
    known = any(m.worker in facts.status or ends(m.worker) for m in members)
    if known or not all(view.host(m.host) for m in members):
        return None
    if any(min(age, facts.silence(m.worker, age)) < limits.abandon_s for m in members):
        return None
    detail = f"{detail} for {limits.abandon_s:g} s{more}"
    return structs.replace(record, state=JobState.FAILED, detail=detail, trained=trained)


def given_up(record: JobRecord, by: str) -> JobRecord:
    """The next revision of ``record`` after an operator has given the job up.

    Its name is free. Workers that wait leave once their hosts have read it.
    """
    detail = f"given up by {by}"
    trained = record.state is JobState.FINISHING
    revision = record.revision + 1
    return structs.replace(
        record, state=JobState.FAILED, detail=detail, trained=trained, revision=revision
    )

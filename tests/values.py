"""Values of a cluster, of which a test states only what it is about.

One job, whose worker on each host has the first incarnation; plans have ended well, alerts are of a
detector that observes.
"""

from __future__ import annotations

from msgspec import structs

from tmd.core.planning.failover import archived
from tmd.core.values.model import (
    Alert,
    JobRecord,
    JobState,
    Member,
    Membership,
    MigrationPlan,
    Phase,
    PlanKind,
    Severity,
    State,
    Strategy,
)


def worker(host):
    return f"{host}/job/0.a"


def member(host):
    return Member(worker(host), host, f"{host}:1")


def record(*hosts, **changes):
    """Of a job that trains, with one rank on each of ``hosts``."""
    plain = JobRecord(
        job="job",
        world_size=len(hosts),
        state=JobState.RUNNING,
        membership=Membership(epoch=1, members=tuple(map(member, hosts))),
        proposed=1,
        revision=1,
    )
    return structs.replace(plain, **changes)


def plan(membership, **changes):
    """One that moved nobody."""
    plain = MigrationPlan(
        id="job-2",
        kind=PlanKind.PLANNED,
        phase=Phase.DONE,
        moves=(),
        old=membership,
        new=membership,
        cause="c",
        reason="r",
    )
    return structs.replace(plain, **changes)


def failover(record, *dead):
    """Of the job of ``record``: it names ``dead`` and waits for the others to halt."""
    return plan(
        record.membership,
        kind=PlanKind.FAILOVER,
        phase=Phase.RECOVER,
        cause="trainer.stalled",
        reason="silent",
        dead=dead,
    )


def large(ranks, *, plans):
    """The record of a job of ``ranks`` that has lost one ``plans`` times."""
    found = record(*(f"h{n}" for n in range(ranks)))
    for number in range(plans):
        lost = failover(found, worker(f"h{number}"))
        named = structs.replace(lost, id=f"job-{number}", witnesses=found.membership.members)
        found = archived(found, named)
    return found


def alert(**changes):
    """Raised, about the host."""
    plain = Alert(
        id="h1-1",
        host="h1",
        detector="d",
        code="c.d",
        entity="host",
        severity=Severity.WARNING,
        state=State.RAISED,
        message="",
        job="",
        strategy=Strategy.OBSERVE,
        count=1,
        at=1.0,
    )
    return structs.replace(plain, **changes)

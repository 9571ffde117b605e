"""Links that break although no worker died: which worker continues, and which one must go.

The first time the same ranks run the step again: as a rule it was a hiccup. If it breaks again,
the peers' word decides: a worker that most of them name as the one whose link broke is treated as
lost, provided that this costs no state and somebody can take its rank. Else the same ranks try a
few times more, and then the job has failed.
"""

from __future__ import annotations

from collections import Counter

from tmd.core.planning.migration import PlanFacts
from tmd.core.values.model import Activity, JobRecord, WorkerStatus

LINK_BROKEN = "link.broken"
IN_VAIN = 5
"""Recoveries of one step without a loss after which the job has failed: it breaks by itself."""
ACCUSERS = 2
"""One worker's word stands against another's."""


def in_vain(record: JobRecord) -> bool:
    """Whether one step broke so often that running it again is no use."""
    last = record.history[-IN_VAIN:]
    return (
        len(last) == IN_VAIN
        and all(p.cause == LINK_BROKEN and not p.dead for p in last)
        and len({p.resume for p in last}) == 1
    )


def broke_before(record: JobRecord, facts: PlanFacts) -> bool:
    """Whether the step in which members are stuck has been run again already."""
    plan, step = record.plan, max((s.step for s in stuck(record, facts)), default=-1)
    return plan is not None and plan.cause == LINK_BROKEN and plan.resume == step


def stuck(record: JobRecord, facts: PlanFacts) -> list[WorkerStatus]:
    """What the stuck members say, of the present epoch."""
    epoch = record.membership.epoch
    statuses = [facts.status.get(m.worker) for m in record.membership.members]
    return [s for s in statuses if s and s.activity is Activity.STUCK and s.epoch >= epoch]


def all_heard(record: JobRecord, facts: PlanFacts) -> bool:
    """Whether no more members will say that they are stuck: others have given their rank back."""
    statuses = [facts.status.get(m.worker) for m in record.membership.members]
    back = [s for s in statuses if s and s.activity is Activity.STANDBY]
    return len(stuck(record, facts)) + len(back) >= record.world_size


def blamed(record: JobRecord, facts: PlanFacts) -> str:
    """The member that broke away from its peers; empty if it is not clear, or if its state would be
    lost with it."""
    members = {m.worker for m in record.membership.members}
    named = Counter(
        suspect
        for status in stuck(record, facts)
        for suspect in set(status.suspects) & members
        if suspect != status.worker
    )
    first, second = [*named.most_common(2), ("", 0), ("", 0)][:2]
    if first[1] < ACCUSERS or first[1] == second[1]:
        return ""
    status = facts.status.get(first[0])
    return first[0] if status is not None and len(status.replicas) > 1 else ""

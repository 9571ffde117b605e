"""Decides after broken links without a dead worker which worker continues and which must go.

At first the same ranks repeat the step, since most breaks are transient. If it breaks again, a
worker that most peers name as the other end of a broken link is treated as lost, provided that no
state is lost with it and a standby can take its rank. Otherwise the same ranks retry a few times,
and then the job has failed.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from tmd.core.planning.migration import PlanFacts
from tmd.core.values.model import Activity, JobRecord, WorkerStatus

LINK_BROKEN = "link.broken"
IN_VAIN = 5
"""Recoveries of one step without a lost worker after which the job has failed."""
ACCUSERS = 2
"""Number of peers that must name a worker; one report stands against another."""


def in_vain(record: JobRecord, facts: PlanFacts) -> bool:
    """Whether the step in which members are stuck broke so often that another repeat is
    pointless."""
    last = record.history[-IN_VAIN:]
    if len(last) < IN_VAIN or last[-1].new.epoch != record.membership.epoch:
        return False  # the history of an ended run with the same name
    step = _broken_step(record, facts)
    return all(p.cause == LINK_BROKEN and not p.dead and p.resume == step for p in last) and all(
        earlier.new.epoch == later.old.epoch for earlier, later in pairwise(last)
    )


def broke_before(record: JobRecord, facts: PlanFacts) -> bool:
    """Whether the step in which members are stuck was repeated before."""
    plan = record.plan
    return (
        plan is not None
        and plan.cause == LINK_BROKEN
        and plan.resume == _broken_step(record, facts)
    )


def _broken_step(record: JobRecord, facts: PlanFacts) -> int:
    """The step in which members are stuck; -1 if none is."""
    return max((s.step for s in stuck(record, facts)), default=-1)


def stuck(record: JobRecord, facts: PlanFacts) -> list[WorkerStatus]:
    """Statuses of the stuck members in the current epoch, one for each worker."""
    epoch = record.membership.epoch
    statuses = [facts.status.get(worker) for worker in record.membership.workers]
    return [s for s in statuses if s and s.activity is Activity.STUCK and s.epoch >= epoch]


def all_heard(record: JobRecord, facts: PlanFacts) -> bool:
    """Whether all members that can report being stuck have: others have given back their rank."""
    workers = record.membership.workers
    statuses = [facts.status.get(worker) for worker in workers]
    back = [s for s in statuses if s and s.activity is Activity.STANDBY]
    return len(stuck(record, facts)) + len(back) >= len(workers)


def blamed(record: JobRecord, facts: PlanFacts) -> str:
    """The member that broke away from its peers; empty if that is unclear, or if its state would
    be lost."""
    members = set(record.membership.workers)
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

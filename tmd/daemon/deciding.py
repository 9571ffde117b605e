"""What the leader decides about each job, from one view of the cluster.

A cluster may have hundreds of jobs on ten thousand hosts, and nothing happens to most of them in
most turns. The leader looks at a job again only when something on which its latest decision rests
has changed, or one of the job's deadlines has come.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Mapping, Sequence
from operator import is_
from typing import NamedTuple

import structlog
from msgspec import structs

from tmd.core.planning.deadlines import Seen, after_outage, seen
from tmd.core.planning.forming import form, why_not_formed
from tmd.core.planning.planning import steer
from tmd.core.planning.readiness import Gap, unprotected
from tmd.core.values.limits import PlanLimits, ShadowGoals
from tmd.core.values.model import ClusterView, HostStatus, JobRecord, Verdict
from tmd.core.values.view_checks import ENDED, left_alone, too_new

FAILED_S = 5.0
"""Seconds until a job whose decision failed is looked at again."""

log = structlog.get_logger("tmd.leader")


class Grounds(NamedTuple):
    """All facts, except the time, on which a decision about one job rests."""

    record: JobRecord | None
    hosts: tuple[HostStatus | None, ...]
    """The hosts of the job's workers and of its record. ``None`` stands for a silent host."""
    rest: tuple[object, ...]
    """Requests, the pause, the breaker, hosts of other versions, exits and findings."""
    verdicts: Sequence[Verdict]

    def same(self, other: Grounds) -> bool:
        """Whether nothing has changed. A status that was not read again is the same object."""
        return (
            self.record is other.record
            and len(self.hosts) == len(other.hosts)
            and all(map(is_, self.hosts, other.hosts))
            and self.rest == other.rest
            and self.verdicts == other.verdicts
        )


def grounds(
    view: ClusterView, record: JobRecord | None, job: str, verdicts: Sequence[Verdict]
) -> Grounds:
    names = dict.fromkeys(host.host for host in view.hosts_of(job))
    if record is not None:
        names |= dict.fromkeys(member.host for member in record.parties)
    hosts = tuple(map(view.host, names))
    requests = view.drains, view.rehearsals, view.unread, view.paused
    also = view.earlier, view.breaker.open
    return Grounds(record, hosts, (*requests, *also, view.exits(job), view.findings(job)), verdicts)


class NothingDecided(NamedTuple):
    """A job about which there was nothing to decide."""

    grounds: Grounds
    until: float
    """Monotonic seconds of its next deadline."""
    gap: Gap | None
    """What its protection lacks."""


class Decider:
    """Decides for one leader, and keeps what it has seen of each job."""

    def __init__(self, limits: PlanLimits, shadow_goals: ShadowGoals) -> None:
        self._limits, self._shadow_goals = limits, shadow_goals
        self._seen: dict[str, Seen] = {}
        self._settled: dict[str, NothingDecided] = {}
        self._logged: dict[str, str] = {}
        self._blind, self._saw_at = False, 0.0

    def next(self, view: ClusterView, job: str, verdicts: Sequence[Verdict]) -> JobRecord | None:
        """The next revision of the record of ``job``; ``None`` if there is nothing to decide.

        ``verdicts``: of the policies about the job in this ``view``.
        """
        record, now = view.record(job), asyncio.get_running_loop().time()
        found = grounds(view, record, job, verdicts)
        settled = self._settled.get(job)
        if settled is not None and now < settled.until and settled.grounds.same(found):
            return None
        try:
            return self._decided(view, job, found, now)
        except Exception:
            # A bug that one job shows must not end the daemons of all, one leader after the other.
            log.exception("the decision about a job failed, it is left as it is", job=job)
            gap = None if settled is None else settled.gap
            self._settled[job] = NothingDecided(found, now + FAILED_S, gap)
            return None

    def _decided(self, view: ClusterView, job: str, found: Grounds, now: float) -> JobRecord | None:
        record = found.record
        known = self._look(view, record, job, now)
        age = 0.0 if known is None else known.age(now)
        silences = {} if known is None else known.silences(now)
        after = self._after(view, record, job, age, silences, found.verdicts)
        if after is not None and after is not record:
            self._settled.pop(job, None)
            self._logged.pop(job, None)
            return after
        limits, ages = structs.astuple(self._limits), {age, *silences.values()}
        ahead = (limit - age for age in ages for limit in limits if limit > age)
        gap = None if record is None else unprotected(view, record)
        self._settled[job] = NothingDecided(found, now + min(ahead, default=math.inf) + 0.001, gap)
        return None

    def due(self, job: str) -> float:
        """When ``job`` has to be looked at again, in monotonic seconds, if nothing changes."""
        settled = self._settled.get(job)
        return math.inf if settled is None else settled.until

    def gap(self, job: str) -> Gap | None:
        """What the protection of ``job`` lacked at the latest look."""
        settled = self._settled.get(job)
        return None if settled is None else settled.gap

    def leave_alone(self, jobs: Collection[str]) -> None:
        """Nothing is decided about ``jobs``, whose records have a later version."""
        for job in jobs:
            self._settled.pop(job, None)
            self._log_once(job, too_new(job))

    def keep(self, jobs: Collection[str]) -> None:
        """Forget all other jobs."""
        for known in (self._seen, self._settled, self._logged):
            for gone in known.keys() - jobs:
                del known[gone]

    def lose_sight(self) -> None:
        """This daemon does not lead any more, or cannot read the cluster."""
        self._blind = True

    def see(self, now: float) -> None:
        """It has read the cluster, at ``now`` (monotonic seconds)."""
        if self._blind:
            missed_s = now - self._saw_at
            self._seen = {j: after_outage(s, now, missed_s) for j, s in self._seen.items()}
            self._settled.clear()
        self._blind, self._saw_at = False, now

    def _look(
        self, view: ClusterView, record: JobRecord | None, job: str, now: float
    ) -> Seen | None:
        """The situation of the job, and since when this leader has seen it."""
        if record is None:
            return None
        self._seen[job] = known = seen(
            self._seen.get(job), view, record, now, self._limits.unheard_s
        )
        return known

    def _after(
        self,
        view: ClusterView,
        record: JobRecord | None,
        job: str,
        age: float,
        silences: Mapping[str, float],
        verdicts: Sequence[Verdict],
    ) -> JobRecord | None:
        if record is None or record.state in ENDED:
            formed = form(view, job, before=record)
            if formed is None and (why := why_not_formed(view, job)):
                self._log_once(job, why)
            return formed or record
        if why := left_alone(record, view):
            self._log_once(job, why)
            return record
        return steer(
            record,
            view,
            verdicts,
            now=time.time(),
            age=age,
            limits=self._limits,
            wanted=self._shadow_goals,
            silences=silences,
        )

    def _log_once(self, job: str, reason: str) -> None:
        if self._logged.get(job) != reason:
            self._logged[job] = reason
            log.info("nothing decided", job=job, reason=reason)


def log_decision(before: JobRecord | None, after: JobRecord) -> None:
    """Log what the stored revision ``after`` changes."""
    plan = after.plan
    fields = {"job": after.job, "revision": after.revision, "state": after.state.value}
    fields["lease_epoch"] = after.lease_epoch
    if after.detail:
        fields["detail"] = after.detail
    if before is None or before.membership.epoch != after.membership.epoch:
        fields["epoch"] = after.membership.epoch
    if plan is not None and (before is None or before.plan != plan):
        fields |= {"plan": plan.id, "kind": plan.kind.value, "phase": plan.phase.value}
        fields |= {"cause": plan.cause, "reason": plan.outcome or plan.reason}
        if plan.rollback is not None:
            fields["rollback"] = plan.rollback.sentence
    log.info("decided", **fields)

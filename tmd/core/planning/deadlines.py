"""The time for which a situation has lasted: the leader's deadlines count from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tmd.core.planning.migration import PlanFacts
from tmd.core.values.model import ClusterView, JobRecord, Phase


class DeadlineFacts(NamedTuple):
    """Facts that must not change while a deadline of a job runs."""

    epoch: int
    plan: str
    phase: Phase | None
    stuck: bool


TOGETHER_S = 10.0
"""Silences that began within this time of each other may have one cause, such as a switch."""
PHASE_S = 1.0
"""By how much the heartbeats of two hosts may be out of phase."""
LATE_S = 7.0
"""Once one of these is over, the others count only from this much later on: connections come back
one after the other."""


class Silence(NamedTuple):
    """No host has reported a worker. Monotonic seconds."""

    began: float
    counts_from: float


class Seen(NamedTuple):
    """A situation, and since when (monotonic seconds) this leader has seen it."""

    situation: DeadlineFacts
    since: float
    unheard: Mapping[str, Silence]
    """By worker: of members, parties of the plan, and standbys that shadow a rank. Silence is no
    part of the situation: in a large job some host always misses a heartbeat, and no deadline would
    ever pass."""

    def age(self, now: float) -> float:
        """Seconds for which the situation has lasted."""
        return now - self.since

    def silences(self, now: float) -> dict[str, float]:
        """Seconds for which nothing has been heard of each worker that is unheard, as far as they
        count: less than 0 for one that may report late."""
        return {worker: now - silence.counts_from for worker, silence in self.unheard.items()}


def seen(
    before: Seen | None, view: ClusterView, record: JobRecord, now: float, unheard_s: float
) -> Seen:
    """The current situation of the job of ``record``; ``before`` is the previous one.

    If a worker reports again after ``unheard_s`` of silence, an outage may just have ended which it
    shared with others: see :data:`LATE_S`. Only silences that began with it start anew. Else a host
    that comes and goes, as one always does in a large job, would keep all others from counting.
    """
    found, status = _situation(view, record), view.workers(record.job)
    named = (*record.parties, *(assignment.member for assignment in record.shadows))
    known = {} if before is None else before.unheard
    # Heartbeats are out of phase: this one may have been missed a little later than others.
    long_ago = now - unheard_s + PHASE_S
    ended = [s.began for worker, s in known.items() if worker in status and s.began <= long_ago]

    def silence_of(worker: str) -> Silence:
        silence = known.get(worker) or Silence(now, now)
        if any(abs(silence.began - began) <= TOGETHER_S for began in ended):
            return silence._replace(counts_from=now + LATE_S)
        return silence

    unheard = {m.worker: silence_of(m.worker) for m in named if m.worker not in status}
    if before is None or before.situation != found:
        return Seen(found, now, unheard)
    return before if unheard == before.unheard else before._replace(unheard=unheard)


def after_outage(before: Seen, now: float, missed_s: float) -> Seen:
    """``before``, once this leader sees the cluster again after ``missed_s``.

    Workers could report nothing meanwhile, and some have not reported again yet: none may be
    presumed dead for that time, nor any deadline pass in it.
    """
    unheard = {
        worker: silence._replace(counts_from=max(now, silence.counts_from))
        for worker, silence in before.unheard.items()
    }
    return Seen(before.situation, min(now, before.since + missed_s), unheard)


def _situation(view: ClusterView, record: JobRecord) -> DeadlineFacts:
    facts, plan = PlanFacts(view, record.job), record.plan
    return DeadlineFacts(
        epoch=record.membership.epoch,
        plan=plan.id if plan else "",
        phase=plan.phase if plan else None,
        stuck=facts.stuck(record.membership),
    )

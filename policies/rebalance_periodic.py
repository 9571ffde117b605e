"""Moves the ranks of one host to a standby at regular intervals, so that every host is exercised.

The host whose ranks have been in place the longest goes first. The heartbeats give the time, so a
recorded view is judged as of its own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import ClassVar

from tmd.plugin import (
    Activity,
    ClusterView,
    JobRecord,
    JobState,
    Phase,
    PlanKind,
    Policy,
    PolicyConfig,
    Positive,
    Urgency,
    Verdict,
)

CAUSE = "rebalance.periodic"


class RebalancePeriodicConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True):
    every_s: Positive = 86_400.0
    """Time from the end of the latest plan of a job, of any kind, to the next move. The first move
    comes as soon as a standby is available."""


class RebalancePeriodic(Policy):
    name: ClassVar[str] = "rebalance_periodic"
    Config: ClassVar[type[PolicyConfig]] = RebalancePeriodicConfig

    def decide(self, view: ClusterView) -> Sequence[Verdict]:
        # Of most hosts: the clock of one may be wrong.
        now = median_low([h.at for h in view.hosts] or [0.0])
        return [
            verdict
            for record in view.jobs
            if record.state is JobState.RUNNING and self._due(record, now)
            for verdict in self._moves(view, record)
        ]

    def _due(self, record: JobRecord, now: float) -> bool:
        assert isinstance(self.config, RebalancePeriodicConfig)
        # Aborted plans count, too: a failed move is not retried at once.
        ends = [p.timeline[-1].at for p in record.history if p.timeline]
        return now - max(ends, default=0.0) >= self.config.every_s

    def _moves(self, view: ClusterView, record: JobRecord) -> list[Verdict]:
        host = _longest_in_place(record)
        leaving = [m for m in record.membership.members if m.host == host]
        waiting = sum(
            w.activity is Activity.STANDBY and h.host != host
            for h in view.hosts_of(record.job)
            for w in h.workers
            if w.job == record.job
        )
        if waiting < len(leaving):
            return []
        return [
            Verdict(
                job=record.job,
                worker=member.worker,
                urgency=Urgency.DRAIN,
                cause=CAUSE,
                reason=f"the ranks of {host} have been in place longest",
                policy=self.name,
            )
            for member in leaving
        ]


def _longest_in_place(record: JobRecord) -> str:
    """The host whose latest rank has been there longest."""
    came = {m.host: -1 for m in record.membership.members}
    for number, plan in enumerate(record.history):
        if plan.kind is PlanKind.PLANNED and plan.phase is not Phase.DONE:
            continue
        for move in plan.moves:
            if move.joiner is not None and move.joiner.host in came:
                came[move.joiner.host] = number
    return min(came, key=lambda host: (came[host], host))

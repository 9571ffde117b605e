"""Moves a slow rank once waiting for it has cost as much as a move.

The ski-rental rule: this costs at most twice the optimum, whatever the future brings. It applies
only with evidence that the host is the cause: slowness alone is as often caused by the workload,
which a new host would not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tmd.plugin import (
    Alert,
    ClusterView,
    HostStatus,
    JobRecord,
    JobState,
    Member,
    MigrationPlan,
    NotNegative,
    Phase,
    PlanKind,
    Policy,
    PolicyConfig,
    Severity,
    Strategy,
    Urgency,
    Verdict,
    WorkerStatus,
)

SLOW = "straggler.slow"
OWN_TROUBLES = (
    *(".unreadable", ".failed"),
    *(".no_log", ".no_events", ".log_lost", "_not_kept"),
)
"""Endings of codes with which detectors report on themselves: no evidence about the host."""
SWITCH = "nvswitch:"
"""A non-fatal switch error is about a link whose GPU is unknown."""
CONFIRMED_STEPS = 60
"""Steps that ``straggler.slow`` takes at most to be raised while a rank is slow."""
REMEMBERED = 5
"""How many of the latest moves determine the cost of one."""


class RebalanceStragglersConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True):
    cost_s: NotNegative = 30.0
    """Lowest assumed cost of a move, in seconds of the job; a higher measured cost replaces it."""
    witnesses: tuple[str, ...] = (
        "xid.",
        "nvml.slowed",
        "nvml.hot",
        "nvml.ecc",
        "nvml.pcie_narrow",
        "nvml.link_",
        "nic.",
        "host.memory_pressure",
        "host.driver_stuck",
        "host.hung_task",
    )
    """Prefixes of the codes of findings that explain a slow host."""
    within_s: NotNegative = 600.0
    """A witness must be raised within this time of ``straggler.slow``. It may be earlier by the
    time that it takes to confirm slowness."""


class RebalanceStragglers(Policy):
    name: ClassVar[str] = "rebalance_stragglers"
    Config: ClassVar[type[PolicyConfig]] = RebalanceStragglersConfig

    def decide(self, view: ClusterView) -> Sequence[Verdict]:
        return [
            verdict
            for record in view.jobs
            if record.state is JobState.RUNNING
            for workers in [view.workers(record.job)]
            for member in record.membership.members
            if (host := view.host(member.host)) and (status := workers.get(member.worker))
            if (verdict := self._judged(record, member, host, status)) is not None
        ]

    def _judged(
        self, record: JobRecord, member: Member, host: HostStatus, status: WorkerStatus
    ) -> Verdict | None:
        if status.pace is None or status.pace.slow_since is None:
            return None
        cost, pace, slow = self._cost(record), status.pace, _slow(host)
        if member.worker not in slow or pace.lost_s < cost:
            return None
        evidence = self._evidence(record, host, slow[member.worker], status)
        if not evidence:
            return None
        return Verdict(
            job=record.job,
            worker=member.worker,
            urgency=Urgency.DRAIN,
            cause=SLOW,
            reason=(
                f"{member.worker} has computed {pace.ratio:.2f} times as long as its peers since "
                f"step {pace.slow_since}; all waited {pace.lost_s:.0f} s for it, a move costs "
                f"{cost:.0f} s; {evidence}"
            ),
            policy=self.name,
        )

    def _cost(self, record: JobRecord) -> float:
        """Seconds of the job that a move costs: the most expensive of the latest ones."""
        assert isinstance(self.config, RebalanceStragglersConfig)
        done = [p for p in record.history if p.kind is PlanKind.PLANNED and p.phase is Phase.DONE]
        return max(self.config.cost_s, *map(_measured, done[-REMEMBERED:]), 0.0)

    def _evidence(
        self, record: JobRecord, host: HostStatus, slow: Alert, status: WorkerStatus
    ) -> str:
        """Evidence that the host is the cause; empty if there is none."""
        for alert in host.alerts:
            if self._speaks(alert, slow, status) and alert.may_concern(status):
                return f"{alert.code} of {alert.entity} on its host"
        here = {m.worker for m in record.membership.members if m.host == host.host}
        if 1 < len(here) < record.world_size and here <= _slow(host).keys():
            return f"all {len(here)} ranks of its host are slow"
        return ""

    def _speaks(self, alert: Alert, slow: Alert, status: WorkerStatus) -> bool:
        assert isinstance(self.config, RebalanceStragglersConfig)
        assert status.pace is not None
        # The median of a block: one step may have waited for an evaluation or a checkpoint.
        confirmed_s, within_s = CONFIRMED_STEPS * status.pace.busy_s, self.config.within_s
        return (
            alert.code.startswith(self.config.witnesses)
            and not alert.code.endswith(OWN_TROUBLES)
            and not (alert.entity.startswith(SWITCH) and alert.severity is Severity.WARNING)
            and alert.severity is not Severity.INFO
            # A detector with strategy observe is on trial and no witness.
            and alert.strategy is not Strategy.OBSERVE
            # One that got worse then says as much as one that came then.
            and any(
                slow.at - confirmed_s - within_s <= at <= slow.at + within_s
                for at in (alert.at, alert.reached_at)
            )
        )


def _measured(plan: MigrationPlan) -> float:
    """From the leader's mark of the switch to that of the next commit: about the pause."""
    marks = {mark.phase: mark.at for mark in plan.timeline}
    return marks.get(Phase.DONE, 0.0) - marks.get(Phase.SWITCH, marks.get(Phase.DONE, 0.0))


def _slow(host: HostStatus) -> dict[str, Alert]:
    """Slow workers of ``host`` that may be moved."""
    return {a.entity: a for a in host.alerts if a.code == SLOW and a.strategy is Strategy.ACT}

"""Moves ranks off a degraded host while it still works.

Only findings about the host count, from a detector that may act; a finding about a GPU counts only
for ranks that may use it. ``replace_failed`` handles findings about workers: another host would
not help, or the worker is already gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tmd.plugin import (
    Alert,
    ClusterView,
    HostStatus,
    JobState,
    Member,
    Policy,
    PolicyConfig,
    Severity,
    Strategy,
    Urgency,
    Verdict,
)

GRAVE = (Severity.FATAL, Severity.DEGRADED)


class DrainDegradedConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True):
    repeated: bool = False
    """Leave a host also for findings that are degraded only because they recur."""


class DrainDegraded(Policy):
    name: ClassVar[str] = "drain_degraded"
    Config: ClassVar[type[PolicyConfig]] = DrainDegradedConfig

    def decide(self, view: ClusterView) -> Sequence[Verdict]:
        causes = {h.host: found for h in view.hosts if (found := self._causes(h))}
        return [
            self._verdict(record.job, member.worker, cause)
            for record in view.jobs
            if record.state is JobState.RUNNING
            for member in record.membership.members
            if member.host in causes
            and (cause := _concerning(causes[member.host], view, record.job, member)) is not None
        ]

    def _causes(self, host: HostStatus) -> list[Alert]:
        """Findings that justify leaving the host, the gravest first."""
        assert isinstance(self.config, DrainDegradedConfig)
        found = [
            alert
            for alert in host.alerts
            if alert.severity in GRAVE
            and alert.strategy is Strategy.ACT
            and not alert.job
            and (alert.stated in (None, *GRAVE) or self.config.repeated)
        ]
        return sorted(found, key=lambda a: GRAVE.index(a.severity))

    def _verdict(self, job: str, worker: str, cause: Alert) -> Verdict:
        what = f"{cause.code} of {cause.entity}"
        return Verdict(
            job=job,
            worker=worker,
            urgency=Urgency.DRAIN,
            cause=cause.code,
            reason=f"{cause.host}: {what}, {cause.severity}: {cause.message}".rstrip(": "),
            policy=self.name,
        )


def _concerning(found: list[Alert], view: ClusterView, job: str, member: Member) -> Alert | None:
    """The first of ``found`` that may affect ``member``."""
    status = view.workers(job).get(member.worker)
    return next((a for a in found if status is None or a.may_concern(status)), None)

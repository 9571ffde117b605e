"""A host that ails is left while it still works.

Only by findings about the host itself of a detector that may act. What is about a worker is
``replace_failed``'s business: on another host it would be the same, or it is over already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tmd.plugin import (
    Alert,
    ClusterView,
    HostStatus,
    JobState,
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
    """Leave a host also for what is degraded only because it came back often enough."""


class DrainDegraded(Policy):
    name: ClassVar[str] = "drain_degraded"
    Config: ClassVar[type[PolicyConfig]] = DrainDegradedConfig

    def decide(self, view: ClusterView) -> Sequence[Verdict]:
        causes = {h.host: cause for h in view.hosts if (cause := self._cause(h)) is not None}
        return [
            self._verdict(record.job, member.worker, causes[member.host])
            for record in view.jobs
            if record.state is JobState.RUNNING
            for member in record.membership.members
            if member.host in causes
        ]

    def _cause(self, host: HostStatus) -> Alert | None:
        """The gravest finding to leave the host for."""
        assert isinstance(self.config, DrainDegradedConfig)
        found = [
            alert
            for alert in host.alerts
            if alert.severity in GRAVE
            and alert.strategy is Strategy.ACT
            and not alert.job
            and (alert.stated in (None, *GRAVE) or self.config.repeated)
        ]
        return min(found, key=lambda a: GRAVE.index(a.severity), default=None)

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

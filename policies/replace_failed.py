"""Replaces a worker that has exited, or that must be treated as lost.

Evidence, strongest first: its exit with an error; a raised FATAL ``trainer.*`` alert of a detector
that may act; a FATAL finding about its host or its GPU (for instance fallen off the bus) of a
detector that may act, while the job commits no step. If none of these explains why members are
stuck: a host without a heartbeat, if the broken link of a stuck member led to a worker there.

While steps are committed, ``drain_degraded`` handles a FATAL finding: an orderly hand-over does
less harm. A worker blocked in a driver that never returns cannot hand anything over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import ClassVar

from tmd.plugin import (
    Activity,
    Alert,
    ClusterView,
    Exit,
    HostStatus,
    JobRecord,
    JobState,
    Member,
    NotNegative,
    Policy,
    PolicyConfig,
    Severity,
    Strategy,
    Urgency,
    Verdict,
    WorkerStatus,
)

STEPS = 10
"""A rank stands still once its step has taken this many times as long as the previous one."""


class ReplaceFailedConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True):
    patience_s: NotNegative = 10.0
    """Seconds for which a fatal finding must last, and the job commit no step, before a rank of the
    host is treated as lost: at least as long as ten steps."""


class ReplaceFailed(Policy):
    name: ClassVar[str] = "replace_failed"
    Config: ClassVar[type[PolicyConfig]] = ReplaceFailedConfig

    def decide(self, view: ClusterView) -> Sequence[Verdict]:
        alerts = _fatal_alerts(view)
        verdicts: list[Verdict] = []
        for record in view.jobs:
            if record.state is JobState.RUNNING:
                seen = list(self._seen(record, view, alerts))
                verdicts += seen or self._inferred(record, view)
        return verdicts

    def _seen(
        self, record: JobRecord, view: ClusterView, alerts: dict[str, Alert]
    ) -> Iterator[Verdict]:
        exits = view.exits(record.job)
        standing = self._standing(record, view)
        named = _named_dead(record)
        for member in record.holders:
            if member.worker in named:
                continue
            ended = exits.get(member.worker)
            alert = alerts.get(member.worker)
            if ended is not None and ended.code != 0:
                yield self._verdict(record, member, "trainer.exited", _how_it_ended(ended))
            elif alert is not None and ended is None:
                yield self._verdict(record, member, alert.code, alert.message)
            elif ended is None and member.worker in standing:
                yield standing[member.worker]

    def _standing(self, record: JobRecord, view: ClusterView) -> dict[str, Verdict]:
        """Members that commit nothing and whose host has a finding that explains it."""
        assert isinstance(self.config, ReplaceFailedConfig)
        hosts = map(view.host, {member.host for member in record.membership.members})
        suspect = {host.host: host for host in hosts if host is not None and host.alerts}
        if not suspect:  # as it is for nearly all jobs of a large cluster
            return {}
        workers = view.workers(record.job)
        found = {}
        for member in record.membership.members:
            status, host = workers.get(member.worker), suspect.get(member.host)
            if status is None or host is None or status.activity is not Activity.TRAINING:
                continue
            patience = max(self.config.patience_s, STEPS * status.step_seconds)
            cause = _fatal(host, status)
            if cause is not None and min(status.stands_s, _age(host, cause)) > patience:
                what = f"{cause.code} of {cause.entity}, and no step for {status.stands_s:.0f} s"
                found[member.worker] = self._verdict(record, member, cause.code, what)
        return found

    def _inferred(self, record: JobRecord, view: ClusterView) -> list[Verdict]:
        workers = view.workers(record.job)
        stuck = [
            workers[m.worker]
            for m in record.holders
            if m.worker in workers and workers[m.worker].activity is Activity.STUCK
        ]
        suspects = {suspect for status in stuck for suspect in status.suspects}
        named = _named_dead(record)
        return [
            self._verdict(record, m, "host.silent", f"host {m.host} is silent, its links broke")
            for m in record.holders
            if m.worker in suspects - named and view.host(m.host) is None
        ]

    def _verdict(self, record: JobRecord, member: Member, cause: str, what: str) -> Verdict:
        return Verdict(
            job=record.job,
            worker=member.worker,
            urgency=Urgency.FAILED,
            cause=cause,
            reason=f"{member.worker}: {what}",
            policy=self.name,
        )


def _age(host: HostStatus, alert: Alert) -> float:
    """Seconds since the alert reached its severity. It counts as old if the clock of its host was
    set back since."""
    seconds = host.at - alert.reached_at
    return seconds if seconds >= 0 else inf


def _how_it_ended(ended: Exit) -> str:
    if ended.code is None:
        return "its process is ending"
    return (
        f"ended with signal {-ended.code}" if ended.code < 0 else f"ended with status {ended.code}"
    )


def _named_dead(record: JobRecord) -> set[str]:
    return set(record.plan.dead) if record.plan is not None else set()


def _fatal_alerts(view: ClusterView) -> dict[str, Alert]:
    return {
        alert.entity: alert
        for host in view.hosts
        for alert in host.alerts
        if alert.severity is Severity.FATAL
        and alert.strategy is Strategy.ACT
        and alert.code.startswith("trainer.")
        and alert.job
    }


def _fatal(host: HostStatus, worker: WorkerStatus) -> Alert | None:
    """A fatal finding about the host that may affect ``worker``."""
    return next(
        (
            alert
            for alert in host.alerts
            if alert.severity is Severity.FATAL
            and alert.strategy is Strategy.ACT
            and not alert.job
            and alert.may_concern(worker)
        ),
        None,
    )

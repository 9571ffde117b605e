"""Prometheus metrics of the cluster, as the store shows it, and of this daemon.

Computed for each scrape. Only finished migrations, each counted once, are remembered.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client import exposition as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tmd import __version__
from tmd.core.planning.migration import is_live
from tmd.core.values.checkpoints import newest
from tmd.core.values.model import (
    FINAL,
    ClusterView,
    JobRecord,
    MigrationPlan,
    Phase,
    PlanKind,
    Severity,
)
from tmd.daemon.web.parts import Local


class Account:
    """Migrations that have ended since this daemon started, each counted once."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        """(kind, outcome) -> number."""
        self.downtime_s = 0.0
        self.pause_s = 0.0
        self._seen: dict[str, None] = {}

    def take(self, jobs: Iterable[JobRecord]) -> None:
        shown = {f"{r.job}/{p.id}": p for r in jobs for p in r.history if p.phase in FINAL}
        for name, plan in shown.items():
            if name not in self._seen:
                self._count(plan)
        # A record that is missing for a moment is not counted again when it returns.
        self._seen = dict.fromkeys([*self._seen, *shown])
        for name in [n for n in self._seen if n not in shown][:-1000]:
            del self._seen[name]

    def _count(self, plan: MigrationPlan) -> None:
        self.ended[plan.kind.value, plan.phase.value] += 1
        if plan.phase is not Phase.DONE or not plan.timeline:
            return
        begin = Phase.SWITCH if plan.kind is PlanKind.PLANNED else plan.timeline[0].phase
        times = [mark.at for mark in plan.timeline if mark.phase is begin]
        if not times:
            return
        seconds = max(0.0, plan.timeline[-1].at - times[0])
        if plan.kind is PlanKind.PLANNED:
            self.pause_s += seconds
        else:
            self.downtime_s += seconds


def exposition(view: ClusterView | None, local: Local, account: Account) -> tuple[bytes, str]:
    """The Prometheus text and its content type; ``view`` is ``None`` without a store."""
    registry = CollectorRegistry(auto_describe=False)
    if view is not None:
        account.take(view.jobs)
    registry.register(_Collector(view, local, account, asyncio.get_running_loop().time()))
    return prometheus.generate_latest(registry), prometheus.CONTENT_TYPE_LATEST


class _Collector(Collector):
    def __init__(
        self, view: ClusterView | None, local: Local, account: Account, now: float
    ) -> None:
        self._view = view
        self._local = local
        self._account = account
        self._now = now

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from _of_daemon(self._local, self._view is not None, self._now)
        yield from _of_account(self._account)
        if self._view is not None:
            yield from _of_hosts(self._view)
            yield from _of_jobs(self._view)


def _of_daemon(local: Local, reachable: bool, now: float) -> Iterator[Metric]:
    yield _gauge("tmd_build_info", "Version of the daemon.", {(__version__,): 1.0}, "version")
    yield _gauge("tmd_store_reachable", "Whether Redis answers this daemon.", {(): reachable})
    yield _gauge("tmd_leader", "Whether this daemon leads.", {(): local.leading})
    yield _gauge("tmd_lease_epoch", "This daemon's newest lease epoch.", {(): local.lease.epoch})
    left = max(0.0, local.lease.until - now) if local.leading else 0.0
    yield _gauge("tmd_lease_remaining_seconds", "Time left on the lease.", {(): left})
    alerts = CounterMetricFamily(
        "tmd_alerts_total", "Alerts raised, worsened or cleared on this host.", labels=["severity"]
    )
    for severity in Severity:
        alerts.add_metric([severity.value], local.alerts[severity])
    yield alerts


def _of_account(account: Account) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "tmd_migrations_total", "Migrations that have ended.", labels=["kind", "outcome"]
    )
    for labels, number in account.ended.items():
        ended.add_metric(labels, number)
    yield ended
    yield CounterMetricFamily(
        "tmd_downtime_seconds_total",
        "From the plan of a failover to the first step committed after it.",
        account.downtime_s,
    )
    yield CounterMetricFamily(
        "tmd_pause_seconds_total",
        "From a planned switch to the report of its first commit: an upper bound of the pause.",
        account.pause_s,
    )


def _of_hosts(view: ClusterView) -> Iterator[Metric]:
    standby = sum(h.standby for h in view.hosts)
    roles = {("active",): len(view.hosts) - standby, ("standby",): standby}
    yield _gauge("tmd_hosts", "Hosts with a current heartbeat.", roles, "role")
    yield _gauge("tmd_drains", "Drain requests.", {(): len(view.drains)})
    yield _gauge("tmd_paused", "Whether new migrations are held back.", {(): view.paused})
    raised = Counter(alert.severity for host in view.hosts for alert in host.alerts)
    levels = {(severity.value,): raised[severity] for severity in Severity}
    yield _gauge("tmd_alerts_raised", "Open alerts in the cluster.", levels, "severity")


def _of_jobs(view: ClusterView) -> Iterator[Metric]:
    ranks, epochs, steps, paces = {}, {}, {}, {}
    plans: Counter[Phase] = Counter(r.plan.phase for r in view.jobs if r.plan and is_live(r.plan))
    for record in view.jobs:
        ranks[record.job, record.state.value] = record.world_size
        epochs[(record.job,)] = record.membership.epoch
        workers = view.workers(record.job)
        for rank, member in enumerate(record.membership.members):
            worker = workers.get(member.worker)
            if worker is not None:
                steps[record.job, str(rank)] = worker.step
                paces[record.job, str(rank)] = worker.step_seconds
    live = {(phase.value,): plans[phase] for phase in Phase if phase not in FINAL}
    yield _gauge("tmd_ranks", "Ranks of a job.", ranks, "job", "state")
    yield _gauge("tmd_epoch", "Group epoch of a job.", epochs, "job")
    yield _gauge("tmd_step", "Steps that a rank has committed.", steps, "job", "rank")
    yield _gauge("tmd_step_seconds", "Duration of a rank's latest step.", paces, "job", "rank")
    yield _gauge("tmd_plans", "Live migration plans.", live, "phase")
    yield from _of_checkpoints(view)


def _of_checkpoints(view: ClusterView) -> Iterator[Metric]:
    steps, missed = {}, {}
    for record in view.jobs:
        known = view.workers(record.job).values()
        saved = newest(w.saved for w in known)
        if saved is not None:
            steps[(record.job,)] = saved.step
        vain = [w.missed.count for w in known if w.missed]
        if saved is not None or vain:
            missed[(record.job,)] = max(vain, default=0)
    yield _gauge("tmd_checkpoint_step", "Step of the newest complete checkpoint.", steps, "job")
    text = "Consecutive failed checkpoints, the most of any rank."
    yield _gauge("tmd_checkpoints_missed", text, missed, "job")


def _gauge(name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for place, value in values.items():
        family.add_metric(place, float(value))
    return family

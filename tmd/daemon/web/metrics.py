"""Prometheus metrics of this host. The leader adds those of the cluster and its jobs.

Computed for each scrape, without a request to Redis.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client import exposition as prometheus
from prometheus_client.core import CounterMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tmd import __version__
from tmd.core.values.model import HostStatus
from tmd.daemon.counters import AlertCounter
from tmd.daemon.web.cluster_metrics import CLUSTER, JOB, gauge, of_cluster
from tmd.daemon.web.parts import Local


def exposition(local: Local, accept: str = "") -> tuple[bytes, str]:
    """The text in the format that the ``Accept`` header asks for, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(local, asyncio.get_running_loop().time()))
    encode, content_type = prometheus.choose_encoder(accept)
    return encode(registry), content_type


class _Collector(Collector):
    def __init__(self, local: Local, now: float) -> None:
        self._local = local
        self._now = now

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        local = self._local
        yield from _of_daemon(local, self._now)
        yield from _of_alerts(local.status, local.alerts)
        yield from _of_workers(local.status)
        yield from of_cluster(local.cluster, local.jobs, local.view)


def _of_daemon(local: Local, now: float) -> Iterator[Metric]:
    yield InfoMetricFamily("tmd_build", "Version of the daemon.", {"version": __version__})
    role = "standby" if local.status.standby else "active"
    host = {CLUSTER: local.cluster, "host": local.status.host, "role": role}
    yield InfoMetricFamily("tmd_host", "This host.", host)
    reachable = not local.store.causes
    yield gauge("tmd_store_reachable", "Whether Redis serves this daemon.", {(): reachable})
    leads = {(local.cluster,): local.leading}
    yield gauge("tmd_leader", "Whether this daemon leads.", leads, CLUSTER)
    yield gauge("tmd_lease_epoch", "This daemon's newest lease epoch.", {(): local.lease.epoch})
    left = max(0.0, local.lease.until - now) if local.leading else 0.0
    yield gauge("tmd_lease_remaining_seconds", "Time left on the lease.", {(): left})


def _of_alerts(status: HostStatus, alerts: AlertCounter) -> Iterator[Metric]:
    raised = Counter((status.host, a.code, a.severity.value) for a in status.alerts)
    text = "Findings that are raised now on this host."
    yield gauge("tmd_alerts_raised", text, raised, "host", "code", "severity")
    total = CounterMetricFamily(
        "tmd_alerts",
        "Alerts that this host raised, worsened or cleared since its daemon started.",
        labels=["host", "code", "severity", "state"],
    )
    for (code, severity, state), number in alerts.counts.items():
        total.add_metric([status.host, code, severity.value, state.value], number)
    yield total


def _of_workers(status: HostStatus) -> Iterator[Metric]:
    activities = Counter((w.job, w.activity.value) for w in status.workers)
    text = "Workers of this host by what they do."
    yield gauge("tmd_workers", text, activities, JOB, "activity")
    ranks = {(w.job, str(w.rank)): w for w in status.workers if w.rank is not None}
    steps = {key: w.step for key, w in ranks.items()}
    text = "Steps that a rank of this host has committed."
    yield gauge("tmd_rank_step", text, steps, JOB, "rank")
    paces = {key: w.step_seconds for key, w in ranks.items()}
    text = "Duration of the latest step of a rank of this host."
    yield gauge("tmd_rank_step_seconds", text, paces, JOB, "rank")
    lags = {(w.job, str(w.shadow.rank)): w.shadow.lag_s for w in status.workers if w.shadow}
    text = "Time by which a standby of this host lags behind the rank that it shadows."
    yield gauge("tmd_shadow_lag_seconds", text, lags, JOB, "rank")

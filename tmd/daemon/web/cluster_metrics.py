"""Metrics of the cluster and its jobs: gauges from the leader's view, and what a leader counts.

All have the label ``tmd_cluster``: they are about the cluster, whichever target shows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tmd.core.planning.migration import is_live
from tmd.core.planning.readiness import readiness
from tmd.core.values.checkpoints import newest
from tmd.core.values.model import ClusterView, JobState, WorkerStatus
from tmd.core.values.snapshots import newest_whole
from tmd.daemon.counters import JobCounter

JOB = "training_job"
"""The label of a job of tmd: Prometheus itself has a label ``job``."""
CLUSTER = "tmd_cluster"
"""The label of a cluster of tmd: operators give ``cluster`` to targets or to a Prometheus."""
WorkersByJob = dict[str, dict[str, WorkerStatus]]
"""job -> worker -> status."""


def gauge(name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
    """A gauge with one value for each tuple of label values."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for place, value in values.items():
        family.add_metric(place, float(value))
    return family


def of_cluster(cluster: str, jobs: JobCounter, view: ClusterView | None) -> Iterator[Metric]:
    """What this daemon counted, and the gauges of ``view`` if it leads."""
    gauges = () if view is None else _gauges(view)
    for metric in (*_counted(jobs), *gauges):
        metric.samples = [
            sample._replace(labels={CLUSTER: cluster, **sample.labels}) for sample in metric.samples
        ]
        yield metric


def _counted(jobs: JobCounter) -> Iterator[Metric]:
    """What this daemon counted while it led. It goes on to show it afterwards, so that the sum over
    all hosts never falls."""
    migrations = CounterMetricFamily(
        "tmd_migrations",
        "Migrations that this daemon led to their end.",
        labels=["kind", "outcome"],
    )
    for (kind, outcome), number in jobs.ended.items():
        migrations.add_metric([kind.value, outcome.value], number)
    yield migrations
    phases = HistogramMetricFamily(
        "tmd_migration_phase_seconds",
        "Durations of the phases of migrations.",
        labels=["kind", "phase"],
    )
    for (kind, phase), times in jobs.phases.items():
        phases.add_metric([kind.value, phase.value], times.buckets(), times.sum_s)
    yield phases
    lost = CounterMetricFamily(
        "tmd_job_lost_rank_seconds",
        "Training time that a job lost, in seconds of rank time.",
        labels=[JOB, "cause"],
    )
    for (job, cause), seconds in jobs.lost.items():
        lost.add_metric([job, cause.value], seconds)
    yield lost


def _gauges(view: ClusterView) -> Iterator[Metric]:
    """Gauges of the cluster and of each job."""
    standby = sum(h.standby for h in view.hosts)
    roles = {("active",): len(view.hosts) - standby, ("standby",): standby}
    yield gauge("tmd_hosts", "Hosts with a current heartbeat.", roles, "role")
    unread = {(): len(view.unread)}
    yield gauge("tmd_hosts_unreadable", "Hosts whose heartbeat has another version.", unread)
    text = "Jobs whose record a later version of tmd wrote."
    yield gauge("tmd_jobs_unreadable", text, {(): len(view.unread_jobs)})
    yield gauge("tmd_drains", "Drain requests.", {(): len(view.drains)})
    yield gauge("tmd_paused", "Whether an operator holds new migrations back.", {(): view.paused})
    is_open = {(): view.breaker.open}
    yield gauge("tmd_breaker_open", "Whether the breaker holds policies back.", is_open)
    plans = [r.plan for r in view.jobs if r.plan is not None and is_live(r.plan)]
    live = Counter((p.kind.value, p.phase.value) for p in plans)
    yield gauge("tmd_plans", "Migrations under way.", live, "kind", "phase")
    workers: WorkersByJob = {record.job: {} for record in view.jobs}
    for host in view.hosts:
        for worker in host.workers:
            workers.setdefault(worker.job, {})[worker.worker] = worker
    yield from _of_jobs(view, workers)
    yield from _of_readiness(view)
    yield from _of_saved_states(view, workers)


def _of_jobs(view: ClusterView, workers: WorkersByJob) -> Iterator[Metric]:
    ranks = {
        (r.job, state.value): r.world_size if r.state is state else 0
        for r in view.jobs
        for state in JobState
    }
    yield gauge("tmd_job_ranks", "Ranks of a job, in its present state.", ranks, JOB, "state")
    epochs = {(r.job,): r.membership.epoch for r in view.jobs}
    yield gauge("tmd_job_epoch", "Group epoch of a job.", epochs, JOB)
    steps = {}
    for record in view.jobs:
        known = workers[record.job]
        found = [known[m.worker].step for m in record.membership.members if m.worker in known]
        if found:
            steps[(record.job,)] = max(found)
    yield gauge("tmd_job_step", "Steps that a job has committed.", steps, JOB)


def _of_readiness(view: ClusterView) -> Iterator[Metric]:
    ready = {r.job: readiness(view, r) for r in view.jobs if r.state is JobState.RUNNING}
    standbys = {
        (job, name): getattr(found, name)
        for job, found in ready.items()
        for name in ("rehearsed", "unrehearsed", "unfit")
    }
    text = "Workers of a running job that wait for a rank."
    yield gauge("tmd_job_standbys", text, standbys, JOB, "readiness")
    bare = {(job,): len(found.open_ranks) for job, found in ready.items()}
    text = "Ranks of a running job that no standby could take now."
    yield gauge("tmd_job_unprotected_ranks", text, bare, JOB)


def _of_saved_states(view: ClusterView, workers: WorkersByJob) -> Iterator[Metric]:
    snapshots, checkpoints, missed = {}, {}, {}
    for record in view.jobs:
        known = workers[record.job].values()
        whole = newest_whole(record.world_size, (w.kept for w in known))
        if whole is not None:
            snapshots[(record.job,)] = whole
        saved = newest(w.saved for w in known)
        if saved is not None:
            checkpoints[(record.job,)] = saved.step
        vain = [w.missed.count for w in known if w.missed]
        if saved is not None or vain:
            missed[(record.job,)] = max(vain, default=0)
    text = "Step of the newest complete snapshot."
    yield gauge("tmd_job_snapshot_step", text, snapshots, JOB)
    text = "Step of the newest complete checkpoint."
    yield gauge("tmd_job_checkpoint_step", text, checkpoints, JOB)
    text = "Consecutive failed checkpoints, the most of any rank."
    yield gauge("tmd_job_checkpoints_missed", text, missed, JOB)

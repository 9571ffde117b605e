"""Metrics: each host reports about itself, the leader also about the cluster."""

from __future__ import annotations

import asyncio
import subprocess

import pytest
from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.daemon.scraped import (
    FAULT,
    OPEN_METRICS,
    RECORD,
    cluster,
    counted,
    every_sample,
    everything,
    host,
    local,
)
from tests.marks import program
from tests.values import plan
from tmd.core.alerts.store_health import StoreLoop, StoreState
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.checkpoints import MissedCheckpoint, SavedCheckpoint
from tmd.core.values.model import (
    HostStatus,
    Phase,
    ShadowStatus,
)
from tmd.core.values.requests import DrainRequest
from tmd.daemon.counters import AlertCounter
from tmd.daemon.web.metrics import exposition
from tmd.testing.clients import worker_status

pytestmark = pytest.mark.looptime


class Shown:
    """The samples of an exposition, as the parser of OpenMetrics reads them."""

    def __init__(self, of):
        body, content_type = exposition(of, OPEN_METRICS)
        assert content_type.startswith("application/openmetrics-text")
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }
        self.names = {name for name, _ in self._samples}

    def __call__(self, name, **labels):
        """The value; ``None`` if there is no such sample."""
        return self._samples.get((name, frozenset(labels.items())))

    def of_cluster(self, name, **labels):
        return self(name, tmd_cluster="c", **labels)

    def of_job(self, name, **labels):
        return self.of_cluster(name, training_job="job", **labels)

    def of_own_job(self, name, **labels):
        """Of this host's part of the job."""
        return self(name, training_job="job", **labels)


async def test_a_host_reports_about_itself_only():
    """Its alerts, its workers, its daemon; nothing of other hosts or of jobs as a whole."""
    counter = AlertCounter()
    counter.add(FAULT)
    training = host("h1", rank=0, step=42, step_seconds=0.25).workers
    shadow = ShadowStatus(rank=1, lag_s=0.5)
    shadowing = structs.replace(worker_status("h1/job/1.a"), shadow=shadow)
    workers = (*training, shadowing)
    of_host = HostStatus("h1", "i", standby=True, alerts=(FAULT,), workers=workers)
    found = Shown(local(of_host, alerts=counter))
    fault = {"host": "h1", "code": "nvml.ecc", "severity": "fatal"}

    assert found("tmd_host_info", tmd_cluster="c", host="h1", role="standby") == 1
    assert found("tmd_alerts_raised", **fault) == 1
    assert found("tmd_alerts_total", state="raised", **fault) == 1
    assert found.of_own_job("tmd_workers", activity="training") == 1
    assert found.of_own_job("tmd_rank_step", rank="0") == 42
    assert found.of_own_job("tmd_rank_step_seconds", rank="0") == 0.25
    assert found.of_own_job("tmd_shadow_lag_seconds", rank="1") == 0.5
    assert (found("tmd_leader", tmd_cluster="c"), found("tmd_lease_remaining_seconds")) == (0, 0)
    assert [name for name in found.names if name.startswith(("tmd_job", "tmd_hosts"))] == []


async def test_the_leader_reports_about_the_cluster():
    view = cluster(
        drains=(DrainRequest("h2", "r"),), paused=True, breaker=Breaker(open=True), unread=("h9",)
    )
    found = Shown(local(view=view))

    assert (found("tmd_leader", tmd_cluster="c"), found("tmd_lease_epoch")) == (1, 7)
    assert (found.of_cluster("tmd_hosts", role="active")) == 4
    assert found.of_cluster("tmd_hosts_unreadable") == 1
    assert [found.of_cluster(n) for n in ("tmd_drains", "tmd_paused", "tmd_breaker_open")] == [
        1,
        1,
        1,
    ]
    assert found.of_job("tmd_job_ranks", state="running") == 2
    assert found.of_job("tmd_job_ranks", state="failed") == 0
    assert (found.of_job("tmd_job_epoch"), found.of_job("tmd_job_step")) == (1, 43)
    assert found.of_job("tmd_job_snapshot_step") == 40


async def test_the_leader_reports_which_standbys_are_ready():
    found = Shown(local(view=cluster()))
    alone = Shown(local(view=cluster(hosts=cluster().hosts[:2])))

    def standbys(of):
        names = ("rehearsed", "unrehearsed", "unfit")
        return [of.of_job("tmd_job_standbys", readiness=name) for name in names]

    assert (standbys(found), standbys(alone)) == ([1, 0, 1], [0, 0, 0])
    assert found.of_job("tmd_job_unprotected_ranks") == 0
    assert alone.of_job("tmd_job_unprotected_ranks") == 2


async def test_checkpoints_are_reported_if_there_are_any():
    """The newest known one, and the number of failed ones since."""

    def reported(**changes):
        found = Shown(local(view=cluster(hosts=(host("h1", **changes),))))
        return [
            found.of_job(name) for name in ("tmd_job_checkpoint_step", "tmd_job_checkpoints_missed")
        ]

    saved = SavedCheckpoint(10, 1.0, "c")

    assert reported() == [None, None]
    assert reported(missed=MissedCheckpoint(20, "No space left", 2)) == [None, 2]
    assert reported(missed=MissedCheckpoint(20, "No space left", 1), saved=saved) == [10, 1]
    assert reported(saved=SavedCheckpoint(30, 2.0, "c")) == [30, 0]


async def test_a_former_leader_still_shows_what_it_counted():
    """The sum over all hosts never falls."""
    found = Shown(local(jobs=counted()))
    phase = {"kind": "failover", "phase": "recover"}

    assert found.of_cluster("tmd_migrations_total", kind="failover", outcome="done") == 1
    assert found.of_cluster("tmd_migration_phase_seconds_bucket", le="1.0", **phase) == 0
    assert found.of_cluster("tmd_migration_phase_seconds_bucket", le="3.0", **phase) == 1
    assert found.of_cluster("tmd_migration_phase_seconds_sum", **phase) == 2
    assert found.of_job("tmd_job_lost_rank_seconds_total", cause="hold") == 8


async def test_a_migration_under_way_is_shown_with_its_phase():
    ready = plan(RECORD.membership, phase=Phase.READY)
    found = Shown(local(view=cluster(jobs=(structs.replace(RECORD, plan=ready),))))

    assert found.of_cluster("tmd_plans", kind="planned", phase="ready") == 1


async def test_a_store_that_does_not_serve_is_shown():
    failing = StoreState(failing={StoreLoop.HEARTBEAT: "out of memory"}, written=True)

    assert Shown(local(store=failing))("tmd_store_reachable") == 0
    assert Shown(local())("tmd_store_reachable") == 1


def test_no_name_takes_a_label_of_prometheus():
    """Prometheus would rename a label ``job`` or ``instance`` when it scrapes."""
    labels = {label for sample in every_sample() for label in sample.labels}

    assert labels & {"job", "instance"} == set()
    assert len(labels) > 8


async def plain_text():
    return exposition(everything())


def test_promtool_finds_nothing_to_criticise():
    """Names, units and help texts as Prometheus wants them."""
    promtool = program("promtool", "prometheus")
    body, _ = asyncio.run(plain_text())
    done = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_no_label_has_a_name_that_prometheus_or_operators_give_to_targets():
    """Prometheus would rename it on the way in, and the rules and the dashboard would find nothing;
    or it would hide what an operator says of the target."""
    labels = {name for sample in every_sample() for name in sample.labels}

    assert "tmd_cluster" in labels
    assert labels.isdisjoint({"cluster", "job", "instance", "namespace", "pod", "region"})

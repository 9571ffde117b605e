"""A daemon whose metrics are shown, and what it reports."""

from __future__ import annotations

import asyncio

from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.values import alert, failover, member, plan, record, worker
from tmd.core.alerts.store_health import StoreState
from tmd.core.planning.election import Lease
from tmd.core.values.checkpoints import SavedCheckpoint
from tmd.core.values.model import (
    Activity,
    ClusterView,
    HostStatus,
    Mark,
    Move,
    Phase,
    Rehearsal,
    Severity,
    ShadowStatus,
)
from tmd.core.values.snapshots import Kept
from tmd.daemon.counters import AlertCounter, JobCounter
from tmd.daemon.web.metrics import exposition
from tmd.daemon.web.parts import Local
from tmd.testing.clients import worker_status

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
FAULT = alert(code="nvml.ecc", severity=Severity.FATAL)
RECORD = record("h1", "h2")


def host(name, activity=Activity.TRAINING, alerts=(), **changes):
    status = structs.replace(worker_status(worker(name), activity=activity), **changes)
    return HostStatus(name, "i", workers=(status,), alerts=alerts)


def cluster(**changes):
    """Two ranks train; one standby has rehearsed, another one is unfit."""
    ranks = [
        host(name, rank=rank, step=42 + rank, step_seconds=0.25, kept=(Kept(0, 40), Kept(1, 40)))
        for rank, name in enumerate(("h1", "h2"))
    ]
    ready = host("h3", Activity.STANDBY, rehearsed=(Rehearsal(step=1, seconds=1.0),))
    refused = Rehearsal(step=1, seconds=1.0, refusal="other bits", suspect=True)
    unfit = host("h4", Activity.STANDBY, rehearsed=(refused,))
    plain = ClusterView(hosts=(*ranks, ready, unfit), jobs=(RECORD,))
    return structs.replace(plain, **changes)


def local(status=None, view=None, alerts=None, jobs=None, store=None):
    return Local(
        cluster="c",
        status=status or host("h1", rank=0, step=42, step_seconds=0.25),
        serving=True,
        leading=view is not None,
        lease=Lease(epoch=7, until=asyncio.get_running_loop().time() + 5),
        alerts=alerts or AlertCounter(),
        jobs=jobs or JobCounter(),
        view=view,
        store=store or StoreState(written=True),
    )


def counted():
    """What a leader counts of a failover that holds for 4 s and then ends."""
    counter = JobCounter()
    begun = structs.replace(
        failover(RECORD, worker("h2")),
        moves=(Move(rank=1, leaver=member("h2")),),
        timeline=(Mark(Phase.RECOVER, 1.0),),
    )
    timeline = (*begun.timeline, Mark(Phase.DONE, 3.0))
    done = structs.replace(begun, phase=Phase.DONE, timeline=timeline)
    recovering = structs.replace(RECORD, plan=begun)
    counter.wrote(RECORD, recovering, cluster())
    for now in (0.0, 4.0):
        counter.look(recovering, ClusterView(), now)
    counter.wrote(recovering, structs.replace(RECORD, plan=done), cluster())
    return counter


def everything():
    """Every metric that there is, with a value."""
    counter = AlertCounter()
    counter.add(FAULT)
    saved = host("h5", saved=SavedCheckpoint(10, 1.0, "c"))
    ready = structs.replace(RECORD, plan=plan(RECORD.membership, phase=Phase.READY))
    view = cluster(hosts=(*cluster().hosts, saved), jobs=(ready,))
    of_host = host(
        "h1", alerts=(FAULT,), rank=0, step=42, step_seconds=0.25, shadow=ShadowStatus(rank=1)
    )
    return local(of_host, view=view, alerts=counter, jobs=counted())


def every_sample():
    """All samples of a daemon that reports everything."""

    async def text():
        return exposition(everything(), OPEN_METRICS)[0].decode()

    families = text_string_to_metric_families(asyncio.run(text()))
    return [sample for family in families for sample in family.samples]

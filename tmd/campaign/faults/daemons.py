"""Faults of daemons, including the leader."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable

from msgspec import structs

from tmd import wire
from tmd.campaign.faults.process import STOPPED, send
from tmd.campaign.kind import FaultKind, Mend, Unfired, nothing
from tmd.campaign.other_release import REMEDY
from tmd.campaign.scenario import FaultPart
from tmd.campaign.stage import CampaignStage
from tmd.child import send as send_signal
from tmd.core.values.model import Activity, ClusterView, HostStatus, WorkerStatus
from tmd.demo.cluster import kill, pids

RESTARTS = 4
STRANGER_S = 5.0
STAYS_S = 600.0
NEWER = "newer"


class OfLater(HostStatus, frozen=True):
    """The status of a host of a later version, with a field that this version does not know."""

    mood: str = "fine"


# The store uses the class name, which does not change between versions.
OfLater.__name__ = HostStatus.__name__


async def _killed(stage: CampaignStage, fault: FaultPart) -> Mend:
    for host in await stage.targets(fault.where):
        await kill(stage.cluster.daemons[host])
    return stage.repair


async def _restarted(stage: CampaignStage, fault: FaultPart) -> Mend:
    """As systemd does: kill it and restart it at once."""
    for host in await stage.targets(fault.where):
        await kill(stage.cluster.daemons[host])
        await stage.cluster.start_daemon(host)
    return nothing


async def _restart_loop(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Each run lasts just long enough for one heartbeat."""
    host = await stage.target(fault.where)
    for _ in range(round(fault.amount) or RESTARTS):
        view = await stage.until(lambda v: v.host(host) is not None)
        status = view.host(host)
        assert status is not None
        before = status.incarnation
        await kill(stage.cluster.daemons[host])
        await stage.cluster.start_daemon(host)
        await stage.until(
            lambda v, old=before: (h := v.host(host)) is not None and h.incarnation != old  # type: ignore[misc]
        )
    return nothing


async def _stopped(stage: CampaignStage, fault: FaultPart) -> Mend:
    """When it continues it does not know that it was stopped."""
    host = await stage.target(fault.where)
    stopped = pids(stage.cluster.daemons[host])
    for pid in stopped:
        await send(pid, signal.SIGSTOP, STOPPED)

    async def proceed() -> None:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return proceed


def _replaced(*, back: bool) -> Callable[[CampaignStage, FaultPart], Awaitable[Mend]]:
    """As in an upgrade: one host after the other, each daemon ended in good order. ``back``: by
    the other release, else by the running one."""

    async def act(stage: CampaignStage, fault: FaultPart) -> Mend:
        if stage.other is None:
            raise Unfired(f"there is no other release: {REMEDY}")
        cluster = stage.cluster
        hosts = [
            h for h in await stage.targets(fault.where) if (h in cluster.daemons_from) is not back
        ]
        if not hosts:
            raise Unfired("that release runs there already")
        for host in hosts:
            cluster.daemons_from.pop(host, None)
            if back:
                cluster.daemons_from[host] = stage.other
            await _restart(stage, host)
        return nothing

    return act


def _led_by(*, other: bool) -> Callable[[CampaignStage, FaultPart], Awaitable[Mend]]:
    """Restart whichever daemon leads until one of that release does."""

    async def act(stage: CampaignStage, fault: FaultPart) -> Mend:
        cluster = stage.cluster
        if all((host in cluster.daemons_from) is not other for host in stage.hosts):
            raise Unfired("no daemon is of that release")
        while ((host := await stage.target("leader")) in cluster.daemons_from) is not other:
            await _restart(stage, host)
        return nothing

    return act


async def _restart(stage: CampaignStage, host: str) -> None:
    """End a daemon in good order and start one; returns once it reports all workers."""
    view = await stage.until(lambda v: v.host(host) is not None)
    before = view.host(host)
    assert before is not None
    send_signal(stage.cluster.daemons[host], signal.SIGTERM)
    await stage.cluster.daemons[host].wait()
    await stage.cluster.start_daemon(host)
    await stage.until(lambda v: _is_anew(before, v))


def _is_anew(before: HostStatus, view: ClusterView) -> bool:
    """Whether another daemon than that of ``before`` reports for its host, with its workers."""
    now = view.host(before.host)
    known = {w.worker for w in before.workers}
    return (
        now is not None
        and now.incarnation != before.incarnation
        and known <= {w.worker for w in now.workers}
    )


async def _newer(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Its status has fields that this version does not know."""
    status = OfLater(host=NEWER, incarnation="1", at=0.0)
    await stage.cluster.store.put_host(status, ttl_s=STRANGER_S, wake=True)
    await stage.until(lambda v: v.host(NEWER) is not None)
    return nothing


async def _newer_words(stage: CampaignStage, fault: FaultPart) -> Mend:
    """A worker of another job there reports an activity that this version does not know."""
    worker = WorkerStatus(
        worker=f"{NEWER}/other/0.1",
        job="other",
        world_size=1,
        address="",
        pid=1,
        activity=Activity.STANDBY,
    )
    structs.force_setattr(worker, "activity", "hibernating")
    status = HostStatus(host=NEWER, incarnation="1", workers=(worker,))
    await stage.cluster.store.put_host(status, ttl_s=STAYS_S, wake=True)

    async def leave() -> None:
        await stage.cluster.store.put_host(status, ttl_s=0.001, wake=True)

    return leave


async def _other_protocol(stage: CampaignStage, fault: FaultPart) -> Mend:
    """A launcher of another version connects to the daemon's socket and must be rejected."""
    host = await stage.target(fault.where)
    socket = stage.cluster.folder(host) / "tmd.sock"
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(wire.encode(wire.LauncherHello(wire.VERSION + 1, "campaign", os.getpid(), ())))
    await writer.drain()
    try:
        header = await reader.readexactly(wire.HEADER_SIZE)
        answer = wire.decode(await reader.readexactly(wire.body_size(header)))
    except asyncio.IncompleteReadError:
        raise Unfired("the daemon closed the connection without a word") from None
    finally:
        writer.close()
    if not isinstance(answer, wire.Rejected):
        raise Unfired(f"the daemon answered {type(answer).__name__}")
    return nothing


KINDS = (
    FaultKind("daemon.killed", "a daemon is killed and stays away for a while", _killed),
    FaultKind("daemon.restarted", "a daemon is killed and started again", _restarted),
    FaultKind("daemon.restart-loop", "a daemon dies soon after each start", _restart_loop),
    FaultKind("daemon.stopped", "a daemon is stopped, and continues later", _stopped),
    FaultKind(
        "daemon.upgraded",
        "daemons of the other release are replaced, one by one",
        _replaced(back=False),
        needs_other=True,
    ),
    FaultKind(
        "daemon.downgraded",
        "daemons are replaced by those of the other release, one by one",
        _replaced(back=True),
        needs_other=True,
    ),
    FaultKind(
        "daemon.other-leads",
        "a daemon of the other release leads",
        _led_by(other=True),
        needs_other=True,
    ),
    FaultKind(
        "daemon.running-leads",
        "a daemon of the running release leads",
        _led_by(other=False),
        needs_other=True,
    ),
    FaultKind("daemon.newer-version", "a host reports fields of a later version", _newer),
    FaultKind("daemon.newer-words", "a host reports values of a later version", _newer_words),
    FaultKind("daemon.other-protocol", "a launcher speaks another version", _other_protocol),
)

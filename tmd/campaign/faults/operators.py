"""Actions of operators, at the right and at the wrong time, and the loss of standbys."""

from __future__ import annotations

import asyncio
import os
import signal

from tmd.campaign.kind import FaultKind, Mend, Unfired, nothing
from tmd.campaign.scenario import FaultPart
from tmd.campaign.stage import CampaignStage
from tmd.campaign.view_checks import verdict
from tmd.child import send
from tmd.demo.cluster import workers

VERDICT_S = 40.0
"""Longest wait for the verdict of a rehearsal: less than a scenario has by default."""


async def _drain(stage: CampaignStage, fault: FaultPart) -> Mend:
    for host in await stage.targets(fault.where):
        await stage.cluster.drain(host)
    return nothing


async def _drain_twice(stage: CampaignStage, fault: FaultPart) -> Mend:
    host = await stage.target(fault.where)
    await stage.cluster.drain(host)
    await stage.cluster.drain(host)
    return nothing


async def _leave(stage: CampaignStage, fault: FaultPart) -> Mend:
    host = await stage.target(fault.where)
    await stage.cluster.drain(host, leave=True)

    async def return_() -> None:
        # Its launcher ends by itself, a moment after the rank has moved.
        await stage.cluster.launchers[host].wait()
        await stage.repair()

    return return_


async def _undrain(stage: CampaignStage, fault: FaultPart) -> Mend:
    if not await stage.cluster.store.undrain(await stage.target(fault.where)):
        raise Unfired("no drain was requested for this host")
    return nothing


async def _undrain_all(stage: CampaignStage, fault: FaultPart) -> Mend:
    for host in stage.hosts:
        await stage.cluster.store.undrain(host)
    await stage.until(lambda v: not v.drains)
    return nothing


async def _pause(stage: CampaignStage, fault: FaultPart) -> Mend:
    await stage.cluster.store.set_paused(True)
    await stage.until(lambda v: v.paused)

    async def resume() -> None:
        await stage.cluster.store.set_paused(False)

    return resume


async def _rehearse(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Ask for a rehearsal, and wait for its verdict."""
    host = await stage.target(fault.where)
    request = await stage.cluster.rehearse(host)
    try:
        async with asyncio.timeout(VERDICT_S):
            view = await stage.until(lambda v: verdict(v, host, request) is not None)
    except TimeoutError:
        raise Unfired(f"no standby of {host} has answered the request to rehearse") from None
    found = verdict(view, host, request)
    if found is not None and found.note:
        raise Unfired(f"the standby of {host} has not rehearsed: {found.note}")
    return nothing


async def _no_standbys(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Stop, by SIGTERM, the launcher of each worker without a rank; mending restarts them."""
    view = await stage.cluster.view()
    found = {w.worker.partition("/")[0] for w in workers(view) if w.rank is None}
    if not found:
        raise Unfired("there is no standby")
    for host in found:
        send(stage.cluster.launchers[host], signal.SIGTERM)
    for host in found:
        await stage.cluster.launchers[host].wait()
    await stage.until(lambda v: all(w.rank is not None for w in workers(v)))

    async def return_() -> None:
        await stage.repair()

    return return_


async def _standby_dies(stage: CampaignStage, fault: FaultPart) -> Mend:
    worker = await stage.worker("standby")
    os.kill(worker.pid, signal.SIGKILL)
    await stage.until(lambda v: all(w.worker != worker.worker for w in workers(v)))
    return nothing


KINDS = (
    FaultKind("operator.drain", "a host is drained", _drain),
    FaultKind("operator.drain-twice", "the same drain is requested twice", _drain_twice),
    FaultKind("operator.leave", "a host is drained for good: 'tmd drain --leave'", _leave),
    FaultKind("operator.undrain", "a drain is withdrawn", _undrain),
    FaultKind("operator.undrain-all", "every drain is withdrawn", _undrain_all),
    FaultKind("operator.pause", "decisions are paused, and resumed later", _pause),
    FaultKind("operator.rehearse", "a standby is asked to rehearse", _rehearse),
    FaultKind("standby.none", "all standbys are ended, and return later", _no_standbys),
    FaultKind("standby.dies", "a waiting standby is killed", _standby_dies),
)

"""Faults of Redis, and of the connections between it and the daemons."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from tmd import embedded
from tmd.campaign.faults.process import STOPPED, send
from tmd.campaign.kind import FaultKind, Mend, Unfired, nothing, once
from tmd.campaign.relay import LinkConditions
from tmd.campaign.scenario import FaultPart
from tmd.campaign.servers import Private, server_binary
from tmd.campaign.stage import CampaignStage
from tmd.campaign.waiting import until
from tmd.core.values.errors import TmdError

DELAY_S = 0.3


def _private(stage: CampaignStage) -> Private:
    if stage.private is None:
        raise Unfired("this cluster's Redis is behind a Sentinel")
    return stage.private


async def _conditions(
    stage: CampaignStage, fault: FaultPart
) -> tuple[list[str], list[LinkConditions]]:
    _private(stage)
    hosts = await stage.targets(fault.where)
    return hosts, [stage.control[host] for host in hosts]


def _clearing(ways: list[LinkConditions]) -> Mend:
    async def clear() -> None:
        for conditions in ways:
            conditions.clear()

    return clear


async def _cut(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Connections are reset, and new ones fail."""
    hosts, ways = await _conditions(stage, fault)
    for conditions in ways:
        conditions.refuse = True
    if not sum([conditions.reset() for conditions in ways]):
        raise Unfired(f"{', '.join(hosts)} had no connection to Redis")
    return _clearing(ways)


async def _affect(
    stage: CampaignStage, fault: FaultPart, effect: Callable[[LinkConditions], None]
) -> Mend:
    """Begin ``effect``, and wait until bytes of each connection have met it."""
    _, ways = await _conditions(stage, fault)
    for conditions in ways:
        effect(conditions)
    await until(lambda: all(conditions.passed for conditions in ways))
    return _clearing(ways)


async def _stall(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Connections stay open but carry nothing."""
    return await _affect(stage, fault, LinkConditions.stall)


async def _deaf(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Redis receives the daemon's requests, but its answers are lost."""
    return await _affect(stage, fault, LinkConditions.stall_back)


async def _slow(stage: CampaignStage, fault: FaultPart) -> Mend:
    def delay(conditions: LinkConditions) -> None:
        conditions.delay_s = fault.amount or DELAY_S

    return await _affect(stage, fault, delay)


async def _reset(stage: CampaignStage, fault: FaultPart) -> Mend:
    _, ways = await _conditions(stage, fault)
    if not sum([conditions.reset() for conditions in ways]):
        raise Unfired("no connection was open")
    return nothing


async def _empty(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Kill and restart it; its data are lost."""
    server = _private(stage)
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)
    return nothing


async def _gone(stage: CampaignStage, fault: FaultPart) -> Mend:
    server = _private(stage)
    await asyncio.to_thread(server.stop)
    return once(server.start)


async def _stopped(stage: CampaignStage, fault: FaultPart) -> Mend:
    server = _private(stage)
    await send(server.pid, signal.SIGSTOP, STOPPED)

    async def proceed() -> None:
        os.kill(server.pid, signal.SIGCONT)

    return proceed


async def _full(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Every write is refused for lack of memory, every read is answered."""
    return await _set(stage, "maxmemory 1", "maxmemory 0", "OOM ")


async def _read_only(stage: CampaignStage, fault: FaultPart) -> Mend:
    """As a master that became a replica: writes are refused."""
    return await _command(stage, "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "READONLY ")


async def _set(stage: CampaignStage, now: str, later: str, proof: str) -> Mend:
    return await _command(stage, f"CONFIG SET {now}", f"CONFIG SET {later}", proof)


async def _command(stage: CampaignStage, now: str, later: str, proof: str) -> Mend:
    server = _private(stage)
    server.tell(now)
    reply = server.tell("SET tmd-campaign-probe 1")
    if proof not in reply:
        raise Unfired(f"Redis still accepts writes: {reply!r}")

    async def restore() -> None:
        server.tell(later)

    return restore


async def _failed_over(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Kill the master; returns once the Sentinel names the other server. The mend starts the killed
    one again, as a replica."""
    pair = stage.sentinel
    if pair is None:
        raise Unfired('there is no Sentinel: [cluster] redis = "sentinel"')
    await until(pair.in_step)
    gone = await asyncio.to_thread(pair.kill_master)
    await until(lambda: pair.master() not in (0, gone))

    async def revive() -> None:
        await asyncio.to_thread(pair.revive, gone)

    return revive


def _no_server() -> str:
    """A server in this process cannot be killed, stopped or filled."""
    if embedded.find_binary():
        return ""
    return "needs a Redis with a process of its own: install redis-server or valkey-server"


def _no_sentinel() -> str:
    try:
        server_binary()
    except TmdError as error:
        return str(error)
    return ""


KINDS = (
    FaultKind("control.cut", "a daemon cannot reach Redis", _cut),
    FaultKind("control.stall", "a daemon's connection to Redis carries nothing", _stall),
    FaultKind("control.answers-lost", "Redis hears a daemon, but its answers are lost", _deaf),
    FaultKind("control.slow", "every answer of Redis is delayed", _slow),
    FaultKind("control.reset", "connections to Redis are reset", _reset),
    FaultKind(
        "control.redis-empty", "Redis is restarted without its data", _empty, unable=_no_server
    ),
    FaultKind(
        "control.redis-gone",
        "Redis is killed, and returns later without its data",
        _gone,
        unable=_no_server,
    ),
    FaultKind(
        "control.redis-stopped", "Redis stops, and continues later", _stopped, unable=_no_server
    ),
    FaultKind("control.redis-full", "Redis is out of memory", _full, unable=_no_server),
    FaultKind(
        "control.redis-read-only", "Redis has become a replica", _read_only, unable=_no_server
    ),
    FaultKind(
        "control.redis-failed-over",
        "a Sentinel makes the replica master",
        _failed_over,
        unable=_no_sentinel,
    ),
)

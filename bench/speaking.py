"""How long the daemon takes to pass on what it learns: a line of the kernel log to a subscriber
of the alerts, and the exit of a worker to a stored plan.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from bench.hosts import DETECTORS, Daemon, Lab, running, settled
from bench.listening import Heard, Subscriber
from tmd.core.planning.directives import Train, Wait
from tmd.core.values.model import Activity
from tmd.testing.clients import FakeLauncher, FakeTrainer, connected, worker_status

LINES = 6
"""For each daemon: user space may write ten lines in five seconds."""
USER_DEBUG = 15
"""Facility 1, level 7: no console prints it."""
PATIENCE_S = 10.0


def lines(lab: Lab, repeat: int) -> list[dict[str, Any]]:
    """Write lines of the driver's kind to /dev/kmsg; each is of a GPU of its own.

    Raises:
        OSError: there is no kernel log that can be written.
    """
    name = f"lines-{repeat}"
    found = []
    with running(lab, name, DETECTORS) as daemon, Subscriber(lab.redis, name) as subscriber:
        settled(daemon)
        log = os.open("/dev/kmsg", os.O_WRONLY)
        try:
            for _ in range(LINES):
                place = f"{os.urandom(2).hex()}:{os.urandom(1).hex()}:00"
                line = f"<{USER_DEBUG}>NVRM: Xid (PCI:{place}): 79, GPU has fallen off the bus.\n"
                before = time.perf_counter()
                os.write(log, line.encode())
                entity = f"pci:{place}.0"
                message = subscriber.until(lambda h, entity=entity: _of(h, entity))  # type: ignore[misc]
                found.append({"line_s": message.at - before, "floor_s": floor(subscriber)})
        finally:
            os.close(log)
    return found


def floor(subscriber: Subscriber) -> float:
    """The way from a PUBLISH to the subscriber alone, by a client that has it ready."""
    word = {"entity": os.urandom(8).hex()}
    body = msgspec.json.encode(word)
    before = time.perf_counter()
    subscriber.client.publish(subscriber.channel, body)
    return subscriber.until(lambda h: _of(h, word["entity"])).at - before


def _of(message: Heard, entity: str) -> bool:
    return message.alert is not None and message.alert["entity"] == entity


def plans(lab: Lab, repeat: int, detectors: str = DETECTORS) -> list[dict[str, Any]]:
    """A job of two ranks and a standby loses a worker: its launcher says so."""
    name = f"plan-{repeat}"
    more = detectors + "\n[shadow]\nrehearse = false\n"
    with running(lab, name, more) as daemon, Subscriber(lab.redis, name) as subscriber:
        settled(daemon)
        return [asyncio.run(_lose(daemon, subscriber))]


async def _lose(daemon: Daemon, subscriber: Subscriber) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        launcher = await _formed(daemon, stack)
        before = time.perf_counter()
        await launcher.exited("host-1/job/0.a", -9)
        return await asyncio.to_thread(_answered, subscriber, daemon.name, before)


async def _formed(daemon: Daemon, stack: AsyncExitStack) -> FakeLauncher:
    """The launcher of a job at work whose workers only talk."""

    async def connection() -> Any:
        return await stack.enter_async_context(connected(daemon.socket))

    workers = tuple(f"host-1/job/{slot}.a" for slot in range(3))
    launcher = FakeLauncher(await connection(), "job", workers)
    await launcher.hello()
    trainers = [FakeTrainer(await connection(), worker_status(worker)) for worker in workers]
    for rank, trainer in enumerate(trainers):
        await trainer.hello()
        if rank == 1:  # the job forms with its second worker: the third stands by
            for number, one in enumerate(trainers[:2]):
                await one.directive(lambda d: isinstance(d, Train), PATIENCE_S)
                await one.say(activity=Activity.TRAINING, rank=number, epoch=1, step=3)
    await trainers[2].directive(lambda d: isinstance(d, Wait), PATIENCE_S)
    await trainers[2].say(activity=Activity.STANDBY)
    await asyncio.sleep(2.0)  # a quiet moment in a long run
    return launcher


def _answered(subscriber: Subscriber, cluster: str, before: float) -> dict[str, Any]:
    """When the alert and the plan came; the plan may be stored before the alert arrives."""
    alert: float | None = None
    plan: float | None = None
    while alert is None or plan is None:
        message = subscriber.until(lambda h: h.alert is None or h.alert["code"] == "trainer.exited")
        if message.alert is not None:
            alert = message.at
        elif plan is None and message.at > before and _planned(subscriber, cluster):
            plan = message.at
    return {
        "exit_to_alert_s": alert - before,
        "exit_to_plan_s": plan - before,
        "alert_to_plan_s": plan - alert,
    }


def _planned(subscriber: Subscriber, cluster: str) -> bool:
    sealed: Any = subscriber.client.hget(f"{{tmd:{cluster}}}:job:job", "record")
    _, _, record = (sealed or b"").partition(b" ")
    return bool(record) and msgspec.json.decode(record).get("plan") is not None

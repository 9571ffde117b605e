"""How the control plane grows: one Redis and one leader, with more and more hosts.

The leader, and the host that would lead after it, are real daemons. The other hosts are made up
(``bench.fleet_hosts``): a process sends to Redis what their daemons would, as often as they would,
and has a subscription for each. Each host has eight workers; jobs have fifty hosts, two of them
with standbys.

``start``: from when the leader's daemon takes connections until all jobs are formed; all hosts have
sent heartbeats before. ``loss``: from the report of a worker's end, or ``drain``: from the request,
until the leader has stored the plan; the made-up workers carry nothing out. ``leader_loss``: the
same for a worker that is lost right after the leader was killed. ``emptied``: from the end of a
Redis that has lost everything until all jobs are in it again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs
from redis import Redis

from bench.fleet_hosts import SPARE, job_of, status
from bench.hosts import NONE, TICKS_S, Daemon, Lab, cpu_s, memory, running
from bench.measure import Report, each, options, parsed
from tmd import embedded
from tmd.config import store_key
from tmd.core.planning.migration import is_live
from tmd.core.values.errors import Conflict
from tmd.core.values.requests import DrainRequest
from tmd.daemon.bus import Topic
from tmd.daemon.store import RedisStore
from tmd.lifeline import die_with_parent

Undo = Callable[[], Awaitable[None]]
SIZES = (100, 1_000, 10_000)
PER_JOB = 50
SECRET = b"only-for-this-benchmark"
PATIENCE_S = 120.0
LOOK_S = 0.1
SETTLE_S = 10.0
"""The leader first assigns the rehearsals of all jobs."""
CLIENTS = 3
"""Connections of a host to Redis."""
LIMITS = {"redis_cpu": 0.5, "leader_cpu": 1.0, "leader_mb": 500.0, "loss_p99_s": 0.5}
"""With ten thousand hosts."""
ROWS = {
    "commands_per_s": ("commands a second", "of all hosts; not seconds"),
    "host_bytes": ("bytes a second of a host", "to and from Redis; not seconds"),
    "redis_cpu": ("share of a core, Redis", "not seconds"),
    "leader_cpu": ("share of a core, leader", "not seconds"),
    "leader_mb": ("memory of the leader in MB", "not seconds"),
    "loss_s": ("a worker's end to the plan", "median"),
    "loss_p99_s": ("  p99", ""),
    "drain_s": ("a drain to the plan", "median"),
    "drain_p99_s": ("  p99", ""),
    "start_s": ("start of the leader to all jobs formed", "the hosts speak already"),
    "leader_loss_s": ("  a worker's end, the leader's before it", "one a run"),
    "emptied_s": ("Redis emptied to all jobs back", "one a run"),
    "late_s": ("how late the load was", "more than 1 s: these hosts were too much for the machine"),
}


def measured(lab: Lab, hosts: int, args: argparse.Namespace, repeat: int) -> dict[str, Any]:
    """One cluster of ``hosts``."""
    name = f"fleet-{hosts}-{repeat}"
    with embedded.redis() as server:
        mine = lab._replace(redis=server.url)
        client = Redis.from_url(server.url)
        client.config_set("maxclients", hosts + 200)
        return asyncio.run(in_cluster(mine, name, hosts, args, server.pid or os.getpid()))


async def in_cluster(
    lab: Lab, name: str, hosts: int, args: argparse.Namespace, redis_pid: int
) -> dict[str, Any]:
    key = store_key(SECRET, name)
    store = RedisStore(lab.redis, name, key, timeout_s=20.0)
    try:
        with (
            load(lab.redis, name, key, hosts) as speaking,
            running(lab, name, NONE) as daemon,
        ):
            began = time.perf_counter()
            await led(store, "host-1")
            await formed(store, hosts // PER_JOB)
            start_s = time.perf_counter() - began
            order(speaking)
            await asyncio.sleep(SETTLE_S)
            shares = await idle(daemon, redis_pid, args.seconds)
            jobs = range(min(2 * args.events, hosts // PER_JOB))
            losses = await times(store, jobs[::2], partial(lose, store, speaking))
            drains = await times(store, jobs[1::2], partial(drain, store))
            found = {**shares, "leader_mb": memory(daemon)["rss_mb"], "start_s": start_s}
            with running(lab, name, NONE, folder=f"{name}-2", TMD_HOST__NAME="host-2"):
                found["leader_loss_s"] = await survived(store, speaking, daemon)
                found["emptied_s"] = await emptied(store, lab.redis, hosts // PER_JOB)
            sent = json.loads(speaking.communicate(timeout=PATIENCE_S)[0])
    finally:
        await store.close()
    found |= {"losses": losses, "drains": drains, "hosts": hosts, **sent}
    for what, seconds in (("loss", losses), ("drain", drains)):
        found[f"{what}_s"], found[f"{what}_p99_s"] = statistics.median(seconds), p99(seconds)
    found["host_bytes"] = (sent["out_bytes_per_s"] + sent["in_bytes_per_s"]) / hosts
    return found


@contextmanager
def load(url: str, name: str, key: bytes, hosts: int) -> Iterator[subprocess.Popen[bytes]]:
    """The process that speaks for the hosts, once it does."""
    words = [url, name, key.hex(), str(hosts), str(PER_JOB)]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.fleet_load", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the process that speaks for the hosts did not start")
        yield process
    finally:
        process.kill()
        process.wait()


async def led(store: RedisStore, host: str) -> None:
    """Wait until the daemon of ``host`` leads."""
    await comes(lambda: _leads(store, host), f"{host} does not lead")


async def _leads(store: RedisStore, host: str) -> bool:
    return (await store.leader()).startswith(f"{host}#")


async def formed(store: RedisStore, jobs: int) -> None:
    """Wait until all ``jobs`` have a record."""

    async def are_there() -> bool:
        return len((await store.jobs()).records) == jobs

    await comes(are_there, "not all jobs have a record")


async def comes(condition: Callable[[], Awaitable[bool]], otherwise: str) -> None:
    for _ in range(round(PATIENCE_S / LOOK_S)):
        if await condition():
            return
        await asyncio.sleep(LOOK_S)
    raise TimeoutError(otherwise)


async def survived(store: RedisStore, speaking: subprocess.Popen[bytes], leader: Daemon) -> float:
    """Seconds from a loss to its plan, if the ``leader`` has just been killed."""

    async def act(job: int) -> Undo:
        leader.process.kill()
        return await lose(store, speaking, job)

    (seconds,) = await times(store, [0], act)
    return seconds


async def emptied(store: RedisStore, url: str, jobs: int) -> float:
    """Seconds until all ``jobs`` are in an empty Redis again."""
    Redis.from_url(url).flushall()
    began = time.perf_counter()
    await formed(store, jobs)
    return time.perf_counter() - began


async def idle(daemon: Daemon, redis_pid: int, seconds: float) -> dict[str, float]:
    """Shares of a core while all train and nothing happens."""
    began, leader, redis = time.perf_counter(), cpu_s(daemon), ticks(redis_pid)
    await asyncio.sleep(seconds)
    passed = time.perf_counter() - began
    return {
        "leader_cpu": (cpu_s(daemon) - leader) / passed,
        "redis_cpu": (ticks(redis_pid) - redis) / passed,
    }


def ticks(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(n) for n in fields[11:13]) / TICKS_S


async def times(
    store: RedisStore, jobs: Iterable[int], act: Callable[[int], Awaitable[Undo]]
) -> list[float]:
    """Seconds from an event in each of ``jobs`` to the job's next revision, at random moments."""
    found = []
    async with aclosing(store.wakes()) as wakes:  # type: ignore[type-var]
        for job in jobs:
            await asyncio.sleep(random.uniform(0.5, 1.5))
            began = time.perf_counter()
            undo = await act(job)
            async with asyncio.timeout(PATIENCE_S):
                async for wake in wakes:
                    if wake.topic is Topic.JOBS and wake.about == f"job-{job}":
                        break
            found.append(time.perf_counter() - began)
            await undo()
            await end_plan(store, f"job-{job}")
    return found


async def end_plan(store: RedisStore, job: str) -> None:
    """Nobody carries the plan out, and a cluster in which all jobs are about to move is not meant
    here."""
    while True:
        (found,) = (await store.jobs_named([job])).records
        if not is_live(found.plan):
            return
        ended = structs.replace(found, plan=None, revision=found.revision + 1)
        with suppress(Conflict):
            await store.put_job(ended, expected=found.revision)


def order(speaking: subprocess.Popen[bytes], *words: int) -> None:
    assert speaking.stdin is not None
    speaking.stdin.write(" ".join(map(str, words)).encode() + b"\n")
    speaking.stdin.flush()


async def lose(store: RedisStore, speaking: subprocess.Popen[bytes], job: int) -> Undo:
    """The launcher of a host sees the end of a worker."""
    concerned = job_of(job, PER_JOB)
    host = random.randrange(PER_JOB - SPARE)

    async def undo() -> None:
        order(speaking, job, host, 0)
        await store.put_host(status(concerned, host, 7), ttl_s=3.0, wake=True)

    order(speaking, job, host, 1)
    await store.put_host(status(concerned, host, 7, dead=True), ttl_s=3.0, wake=True)
    return undo


async def drain(store: RedisStore, job: int) -> Undo:
    host = job_of(job, PER_JOB).hosts[random.randrange(PER_JOB - SPARE)]

    async def undo() -> None:
        await store.undrain(host)

    await store.drain(DrainRequest(host, f"drain-{job}", by="bench"))
    return undo


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, round(0.99 * len(seconds)))]


def tell(report: Report, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for hosts, found in runs.items():
        shown = figures[hosts] = {key: each(found, key) for key in ROWS}
        for key, (what, remark) in ROWS.items():
            report.row(f"{hosts}: {what}", shown[key], remark)
    largest = figures.get(str(max(map(int, figures), default=0)), {})
    for key, limit in LIMITS.items():
        value = largest.get(key, {}).get("median") if str(SIZES[-1]) in figures else None
        report.target(f"{SIZES[-1]} hosts: {key} <= {limit:g}", value, limit, at_least=False)
    return figures


def main() -> int:
    parser = options("fleet", __doc__, repeats=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="HOSTS")
    parser.add_argument("--events", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parsed(parser)
    if args.quick:
        args.repeats, args.sizes, args.events, args.seconds = 1, [2 * PER_JOB], 1, 2.0
    report = Report("fleet", args)
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), "", dict(os.environ))
        for repeat in range(args.repeats):
            for hosts in args.sizes:
                report.progress(f"{hosts} hosts, {repeat + 1}/{args.repeats}")
                found = report.attempt(str(hosts), partial(measured, lab, hosts, args, repeat))
                runs.setdefault(str(hosts), []).extend([found] if found else [])
    return report.finish(runs, tell(report, runs))


if __name__ == "__main__":
    raise SystemExit(main())

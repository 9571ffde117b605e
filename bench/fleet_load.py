"""A process that speaks to Redis for all made-up hosts, each at its own moment of the second.

``python -m bench.fleet_load URL CLUSTER KEY HOSTS PER_JOB``. Their workers start until an empty
line on stdin says that all jobs are formed, which somebody else must do. Then they train. A line
with the numbers of a job and of one of its hosts, and 1 or 0, says that a worker there has ended,
or lives again, which the host reports from then on. The end of stdin ends it, and it prints what it
has sent and how late it was.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from bench.fleet_hosts import SCRIPTS, Wire, jobs_of, starting, status
from tmd.daemon import lua

SLICES = 50
"""Of a second, in each of which a part of the hosts speaks."""
ALL_EVERY_S, LEASE_EVERY_S, REQUESTS_EVERY_S = 45, 8, 5
"""As daemons do: all records, the lease, requests."""
LANES = 8
"""Connections, through which many hosts speak; a real one has its own."""
LISTENERS_AT_ONCE = 200


class Fleet:
    def __init__(self, url: str, cluster: str, key: bytes, hosts: int, per_job: int) -> None:
        self.jobs = jobs_of(hosts, per_job)
        self.hosts = [(job, number) for job in self.jobs for number in range(per_job)]
        self.per_job = per_job
        self.wire = Wire(cluster, key)
        self.marks: dict[str, bytes] = {}
        self.reads: dict[str, bytes] = {}
        self.path = url.removeprefix("unix://")
        self.redis = Redis.from_url(url)
        for script in SCRIPTS:
            self.redis.script_load(lua.lean(script))
        self.sent = self.bytes_out = self.bytes_in = self.woken = 0
        self.late_s = 0.0
        self.is_led = False
        for job in self.jobs:
            self.learn(job.name)
        self.beats = [
            [self.wire.heartbeat(starting(job, number))] * 2 for job, number in self.hosts
        ]

    def train(self) -> None:
        """Two steps, in turn: no status is that of the second before."""
        self.is_led = True
        self.beats = [
            [self.wire.heartbeat(status(job, number, step)) for step in (5, 6)]
            for job, number in self.hosts
        ]

    def learn(self, job: str) -> None:
        """What its hosts send once they have read the job's record."""
        place = f"{self.wire.prefix}job:{job}"
        parts: Any = self.redis.hmget(place, ["revision", "fence", "seal"])
        self.marks[job] = b" ".join(part or b"" for part in parts)
        self.reads[job] = self.wire.own_record(job, self.marks[job])
        self.all = self.wire.all_records(self.marks)

    def report(self, job: int, number: int, *, dead: bool) -> None:
        """From now on this host says that its first worker is ``dead``, or lives again."""
        place, steps = job * self.per_job + number, (7, 7) if dead else (5, 6)
        statuses = (status(self.jobs[job], number, step, dead=dead) for step in steps)
        self.beats[place] = [self.wire.heartbeat(each) for each in statuses]

    def commands(self, place: int, second: int) -> Iterator[bytes]:
        """What host number ``place`` sends in this second."""
        job, number = self.hosts[place]
        yield self.beats[place][second % 2]
        yield self.all if (second + place) % ALL_EVERY_S == 0 else self.reads[job.name]
        if self.is_led and (second + place) % LEASE_EVERY_S == 0:
            yield self.wire.lease(job.hosts[number])
        if (second + place) % REQUESTS_EVERY_S == 0:
            yield self.wire.requests()

    async def speak(self, stop: asyncio.Event) -> None:
        lanes = [await asyncio.open_unix_connection(self.path) for _ in range(LANES)]
        drains = [asyncio.create_task(self.drain(reader)) for reader, _ in lanes]
        start, turn = time.monotonic(), 0
        while not stop.is_set():
            second, part = divmod(turn, SLICES)
            _, lane = lanes[turn % LANES]
            commands = [
                command
                for place in range(part, len(self.hosts), SLICES)
                for command in self.commands(place, second)
            ]
            data = b"".join(commands)
            # A heartbeat is two commands.
            self.sent += len(commands) + len(range(part, len(self.hosts), SLICES))
            self.bytes_out += len(data)
            lane.write(data)
            await lane.drain()
            turn += 1
            wait = start + turn / SLICES - time.monotonic()
            self.late_s = max(self.late_s, -wait)
            await asyncio.sleep(max(0.0, wait))
        for _, writer in lanes:
            writer.close()
        for task in drains:
            task.cancel()

    async def drain(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 20):
            self.bytes_in += len(data)

    async def listen(self) -> None:
        """One subscription for each host, as its daemon has, which only counts."""
        for first in range(0, len(self.hosts), LISTENERS_AT_ONCE):
            some = self.hosts[first : first + LISTENERS_AT_ONCE]
            lanes = await asyncio.gather(*(asyncio.open_unix_connection(self.path) for _ in some))
            for (job, number), (reader, writer) in zip(some, lanes, strict=True):
                writer.write(self.wire.subscribe(job, number))
                self.ears.append(asyncio.create_task(self.hear(reader, writer)))

    async def hear(self, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.woken += data.count(b"message")

    async def follow(self, url: str) -> None:
        """Read a record once for each host of its job when it changes, as the hosts do."""
        reader, lane = await asyncio.open_unix_connection(self.path)
        drains = asyncio.create_task(self.drain(reader))
        async with AsyncRedis.from_url(url).pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(self.wire.prefix + "wake:observers")
            async for message in pubsub.listen():
                topic, _, name = message["data"].decode().partition(" ")
                if topic == "jobs" and name in self.reads:
                    lane.write(self.reads[name] * self.per_job)
                    self.sent += self.per_job
                    self.learn(name)
        drains.cancel()

    async def run(self, url: str) -> None:
        stop = asyncio.Event()

        async def hear() -> None:
            while line := await orders.readline():
                if line == b"\n":
                    self.train()
                else:
                    job, number, dead = map(int, line.split())
                    self.report(job, number, dead=bool(dead))
            stop.set()

        orders = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
        )
        hearing = asyncio.create_task(hear())
        self.ears: list[asyncio.Task[None]] = []
        await self.listen()
        follower = asyncio.create_task(self.follow(url))
        print("ready", flush=True)
        began = time.monotonic()
        await self.speak(stop)
        seconds = time.monotonic() - began
        follower.cancel()
        await hearing
        print(
            json.dumps(
                {
                    "commands_per_s": self.sent / seconds,
                    "out_bytes_per_s": self.bytes_out / seconds,
                    "in_bytes_per_s": self.bytes_in / seconds,
                    "late_s": self.late_s,
                    "woken": self.woken,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    _, url, cluster, key, hosts, per_job = sys.argv
    fleet = Fleet(url, cluster, bytes.fromhex(key), int(hosts), int(per_job))
    asyncio.run(fleet.run(url))

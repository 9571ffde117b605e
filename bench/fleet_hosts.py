"""Hosts that are made up: what each of a large cluster would store and ask for in Redis.

Their daemons are not real. What they send is encoded by the store of real ones, and sent as often
as real ones send it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from tmd.core.values.model import (
    Activity,
    Exit,
    HostStatus,
    WorkerStatus,
)
from tmd.daemon import lua, lua_records
from tmd.daemon.codec import Codec
from tmd.daemon.scripts import digest

WORKERS = 8
"""Of each host."""
SPARE = 2
"""Hosts of each job that hold no rank."""
TTL_MS = 3000
SCRIPTS = (lua_records.JOBS_NAMED, lua_records.JOBS, lua.ACQUIRE, lua.FIELDS)
"""All that they run."""


class Job(NamedTuple):
    name: str
    hosts: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return (len(self.hosts) - SPARE) * WORKERS


def job_of(number: int, per_job: int) -> Job:
    """The job ``number``, on ``per_job`` hosts."""
    return Job(f"job-{number}", tuple(f"host-{number}-{h:02}" for h in range(per_job)))


def jobs_of(hosts: int, per_job: int) -> list[Job]:
    """``hosts`` hosts in jobs of ``per_job``, in the order of their names."""
    return [job_of(number, per_job) for number in range(hosts // per_job)]


def worker(job: Job, host: str, place: int) -> str:
    return f"{host}/{job.name}/{place}.a"


def starting(job: Job, number: int) -> HostStatus:
    """What the daemon of the job's host ``number`` reports before the job is formed."""
    trains = status(job, number, 0)
    workers = tuple(
        structs.replace(w, activity=Activity.STARTING, rank=None, epoch=0, loss=None)
        for w in trains.workers
    )
    return structs.replace(trains, workers=workers)


def status(job: Job, number: int, step: int, *, dead: bool = False) -> HostStatus:
    """What it reports in ``step``. ``dead``: its first worker has just been killed."""
    host, spare = job.hosts[number], number >= len(job.hosts) - SPARE
    workers = tuple(
        WorkerStatus(
            worker=worker(job, host, place),
            job=job.name,
            world_size=job.ranks,
            address=f"10.0.0.1:{place}",
            pid=1000 + place,
            activity=Activity.STANDBY if spare else Activity.TRAINING,
            rank=None if spare else number * WORKERS + place,
            epoch=0 if spare else 1,
            step=0 if spare else step,
            loss=None if spare else 2.0 + 0.001 * step,
            step_seconds=0.0 if spare else 1.0 + 0.0001 * step,
            rss_bytes=4_000_000_000 + step,
            links_opened=6,
            timings={"forward": 0.31, "backward": 0.52, "optimizer": 0.08},
        )
        for place in range(WORKERS)
    )
    ended = (Exit(workers[0].worker, job.name, -9, at=float(step)),) if dead else ()
    return HostStatus(host, "i", spare, workers[1:] if dead else workers, ended, at=float(step))


class Wire:
    """Commands as bytes."""

    def __init__(self, cluster: str, key: bytes) -> None:
        self.prefix = f"{{tmd:{cluster}}}:"
        self._codec = Codec(key, self.prefix)

    def command(self, *words: str | bytes | int) -> bytes:
        parts = [w if isinstance(w, bytes) else str(w).encode() for w in words]
        lengths = (b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        return b"*%d\r\n%s" % (len(parts), b"".join(lengths))

    def script(self, text: str, keys: Sequence[str], *words: str | bytes | int) -> bytes:
        names = [self.prefix + key for key in keys]
        return self.command("EVALSHA", digest(text), len(names), *names, self.prefix, *words)

    def heartbeat(self, status: HostStatus) -> bytes:
        """Nothing of it is urgent."""
        host, value = status.host, self._codec.sealed(status)
        stored = self.command("SET", f"{self.prefix}host:{host}", value, "PX", TTL_MS)
        return stored + self.command("SADD", f"{self.prefix}hosts", host)

    def subscribe(self, job: Job, number: int) -> bytes:
        listener = HostStatus(job.hosts[number], "i").listener
        return self.command("SUBSCRIBE", self.prefix + "wake", f"{self.prefix}wake:{listener}")

    def own_record(self, job: str, mark: bytes) -> bytes:
        """The read of its job's record, of which the host has that with ``mark``."""
        return self.script(lua_records.JOBS_NAMED, ["jobs"], job, mark)

    def all_records(self, marks: dict[str, bytes]) -> bytes:
        known = [word for pair in marks.items() for word in pair]
        return self.script(lua_records.JOBS, ["jobs"], *known)

    def lease(self, host: str) -> bytes:
        """Asks for one millisecond only, so that no made-up host ever leads."""
        return self.script(lua.ACQUIRE, ["leader", "epoch"], HostStatus(host, "i").listener, 1, 0)

    def requests(self) -> bytes:
        return self.script(lua.FIELDS, ["healthy"])

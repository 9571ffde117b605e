"""A small cluster on this machine: real daemons, real launchers, real workers, one Redis.

Used by the demo, the end-to-end tests and the benchmarks. Every process is stopped through its own
handle when the ``async with`` block exits, for any reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Self

from msgspec import Struct

from tmd.child import send
from tmd.config import store_key
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import Activity, Alert, ClusterView, HostStatus, WorkerStatus
from tmd.core.values.requests import DrainRequest, HealthyRequest, RehearsalRequest
from tmd.daemon.bus import WakeEvent
from tmd.daemon.store import RedisStore
from tmd.lifeline import die_with_parent

LEASE_S = 3.0
"""Lifetime of the leader's lease."""
CONFIG = """\
[cluster]
name = "{job}"
secret = "{secret}"

[redis]
url = "{redis}"

[host]
name = "{host}"
standby = {standby}
advertise = "127.0.0.1"
runtime_dir = "{folder}"
state_dir = "{folder}/state"
heartbeat_s = 0.5
ttl_s = 2.0

[leader]
ttl_s = {lease_s}
renew_s = 1.0

[log]
format = "json"

[detectors.trainer]
heartbeat_timeout_s = {silence}
{watch_no_hardware}
{more}
"""
HARDWARE = ("host", "nic", "nvml", "xid")
"""Detectors that would watch the same machine for each of its simulated hosts. They are off unless
a host's own configuration points them elsewhere."""
STOP_S = 10.0


class Installation(Struct, frozen=True):
    """An installed release of tmd."""

    python: str
    """Its interpreter."""
    environment: dict[str, str] = {}
    """Replaces variables that are of the running release, such as a PYTHONPATH."""


class ClusterSpec(Struct, frozen=True):
    """The processes to start."""

    folder: Path
    redis: str
    job: str
    active: tuple[str, ...]
    standby: tuple[str, ...]
    script: tuple[str, ...]
    """Training script and its arguments."""
    per_host: int = 1
    """Workers of each host."""
    prefix: tuple[str, ...] = ()
    """Prefix of each command, for instance to run it in its own network namespace."""
    silence_s: float = 2.0
    """A worker silent for this long counts as stalled."""
    max_restarts: int = 0
    restart_delay_s: float = 1.0
    more_config: str = ""
    own_config: dict[str, str] = {}
    """Host -> additional configuration of its daemon."""
    environment: dict[str, str] = {}
    own_environment: dict[str, dict[str, str]] = {}
    """Host -> additional environment of its processes."""
    daemons_from: dict[str, Installation] = {}
    """Host -> another release, whose daemon it runs first."""
    launchers_from: dict[str, Installation] = {}
    """Host -> another release, whose launcher and workers it runs."""


class LocalCluster:
    """Hosts that are only folders, each with its own daemon and launcher."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.trace = spec.folder / "trace"
        self.daemons_from = dict(spec.daemons_from)
        """Host -> another release, whose daemon it runs from the next start on."""
        self.daemons: dict[str, Process] = {}
        self.launchers: dict[str, Process] = {}
        self._secret = secrets.token_hex(16)
        key = store_key(self._secret.encode(), spec.job)
        self.store = RedisStore(spec.redis, spec.job, key)
        self._bell = WakeEvent()
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._listening = asyncio.create_task(self._listen())
        try:
            hosts = (*self.spec.active, *self.spec.standby)
            for host in hosts:
                self._write_config(host)
                await self.start_daemon(host)
            for host in hosts:
                await self.start_launcher(host)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        # Launchers first: they end their workers, which a daemon does not.
        await _stop_all(self.launchers.values())
        await _stop_all(self.daemons.values())
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        await self.store.close()

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                async for _ in self.store.wakes():
                    self._bell.ring()
            await asyncio.sleep(0.2)

    # --- starting ---------------------------------------------------------------------------------

    def folder(self, host: str) -> Path:
        """The runtime folder of ``host``: configuration, socket, logs."""
        return self.spec.folder / host

    def config(self, host: str) -> Path:
        return self.folder(host) / "tmd.toml"

    def log(self, host: str) -> str:
        """Everything that daemon, launcher and workers of ``host`` have written."""
        files = sorted(self.folder(host).glob("**/*.log"))
        return "".join(p.read_text(errors="replace") for p in files)

    def _write_config(self, host: str) -> None:
        spec = self.spec
        own = spec.own_config.get(host, "")
        unseen = [n for n in HARDWARE if f"[detectors.{n}]" not in own]
        self.folder(host).mkdir(parents=True, exist_ok=True)
        text = CONFIG.format(
            lease_s=LEASE_S,
            job=spec.job,
            secret=self._secret,
            redis=spec.redis,
            host=host,
            standby=str(host in spec.standby).lower(),
            folder=self.folder(host),
            silence=spec.silence_s,
            watch_no_hardware="".join(f"[detectors.{n}]\nenabled = false\n" for n in unseen),
            more=spec.more_config + own,
        )
        self.config(host).touch(mode=0o600)  # it holds the secret
        self.config(host).write_text(text)

    async def start_daemon(self, host: str) -> None:
        """Start or restart the daemon of ``host``."""
        # As `tmd daemon` executes it: reading the verbs of `tmd` first takes as long again.
        release, command = self.daemons_from.get(host), ("tmd.daemon", "-c", self.config(host))
        self.daemons[host] = await self._start(host, "daemon", release, *command)

    async def lose(self, host: str) -> None:
        """Kill daemon, launcher and workers of ``host`` without notice."""
        await kill(self.daemons[host])
        await kill(self.launchers[host])

    async def start_launcher(self, host: str, *more: str) -> None:
        """Start or restart the launcher of ``host`` and thus its workers."""
        spec = self.spec
        self.launchers[host] = await self._start(
            host,
            "launch",
            spec.launchers_from.get(host),
            *("tmd.cli", "launch", "-c", self.config(host), "--job", spec.job),
            *("--nnodes", str(len(spec.active)), "--nproc-per-node", str(spec.per_host)),
            *("--max-restarts", str(spec.max_restarts)),
            *("--restart-delay", str(spec.restart_delay_s)),
            *("--trace", self.trace, "--log-dir", self.folder(host) / "workers"),
            *more,
            *("--", *spec.script),
        )

    async def _start(
        self, host: str, name: str, release: Installation | None, module: str, *more: str | Path
    ) -> Process:
        # A prefix may run the command in a process of the running release.
        python = (*self.spec.prefix, sys.executable) if release is None else (release.python,)
        with (self.folder(host) / f"{name}.log").open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *(*python, "-P", "-m", module, *map(str, more)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment(host, release),
                process_group=0,
                preexec_fn=die_with_parent,
            )

    def _environment(self, host: str, release: Installation | None) -> dict[str, str]:
        spec = self.spec
        own = spec.own_environment.get(host, {})
        other = {} if release is None else release.environment
        return {**os.environ, "OMP_NUM_THREADS": "1", **spec.environment, **own, **other}

    # --- looking ----------------------------------------------------------------------------------

    async def view(self) -> ClusterView:
        """The cluster as the leader would see it now."""
        return await self.store.snapshot()

    async def views(self) -> AsyncIterator[ClusterView]:
        """A new view after each wake-up, and periodically."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                yield await self.view()
            await self._bell.wait(0.2)

    async def until(
        self, wanted: Callable[[ClusterView], bool], what: str, within_s: float = 60.0
    ) -> ClusterView:
        """The first view for which ``wanted`` holds.

        Raises:
            TimeoutError: it did not hold in time; the message has the state of the job.
        """
        view = ClusterView()
        try:
            async with asyncio.timeout(within_s):
                while True:
                    with contextlib.suppress(StoreUnavailable):
                        view = await self.view()
                        if wanted(view):
                            return view
                    self._check_alive()
                    await self._bell.wait(0.2)
        except TimeoutError:
            raise TimeoutError(
                f"not reached within {within_s:g} s: {what}\n{describe(view)}"
            ) from None

    def _check_alive(self) -> None:
        over = [h for h, p in self.launchers.items() if p.returncode not in (None, 0, -9, -15)]
        if over and all(p.returncode is not None for p in self.launchers.values()):
            raise RuntimeError(f"all launchers have exited; log of {over[0]}:\n{self.log(over[0])}")

    async def leader(self) -> str:
        """Holder of the lease, ``<host>#<incarnation>``, or an empty string."""
        return await self.store.leader()

    async def alerts(self) -> list[Alert]:
        """The output of ``tmd events``: all published alerts, in order."""
        found: list[tuple[str, Alert]] = []
        while batch := await self.store.alerts(found[-1][0] if found else "", limit=1000):
            found += batch
        return [alert for _, alert in found]

    async def declare_healthy(self, host: str) -> None:
        """The same as ``tmd set-healthy``."""
        await self.store.declare_healthy(
            HealthyRequest(host=host, id=uuid.uuid4().hex, at=time.time())
        )

    async def drain(self, host: str, *, leave: bool = False, soft: bool = False) -> None:
        """The same as ``tmd drain``."""
        await self.store.drain(
            DrainRequest(host=host, id=uuid.uuid4().hex, leave=leave, soft=soft, at=time.time())
        )

    async def undrain(self, host: str) -> None:
        """The same as ``tmd undrain``."""
        await self.store.undrain(host)

    async def rehearse(self, host: str) -> str:
        """The same as ``tmd standby rehearse --no-wait``; return the id of the request."""
        request = RehearsalRequest(host=host, id=uuid.uuid4().hex, at=time.time())
        await self.store.rehearse(request)
        return request.id

    async def finished(self, within_s: float) -> dict[str, int]:
        """Exit status of each launcher once all have exited."""
        async with asyncio.timeout(within_s):
            return {h: await p.wait() for h, p in self.launchers.items()}


def workers(view: ClusterView) -> list[WorkerStatus]:
    """All workers, by host."""
    return [w for h in sorted(view.hosts, key=lambda h: h.host) for w in h.workers]


def ready(view: ClusterView, ranks: int, standbys: int, step: int = 1) -> bool:
    """Whether all ranks have committed ``step`` steps and the standbys wait."""
    doing = [w.activity for w in workers(view)]
    steps = [w.step for w in workers(view) if w.activity is Activity.TRAINING]
    return len(steps) == ranks and min(steps) >= step and doing.count(Activity.STANDBY) >= standbys


def describe(view: ClusterView) -> str:
    """A few lines for error messages."""
    lines = [
        f"{w.worker} {w.activity} rank={w.rank} epoch={w.epoch} step={w.step} "
        f"plan={w.plan} {w.detail}"
        for w in workers(view)
    ]
    lines += [f"exit {e.worker} {e.code}" for h in view.hosts for e in h.exits]
    for job in view.jobs:
        lines.append(f"job {job.job}: {job.state} {job.detail}")
        if job.plan is not None:
            lines.append(f"plan {job.plan.id}: {job.plan.kind} {job.plan.phase} {job.plan.outcome}")
    return "\n".join(lines)


def host_of(view: ClusterView, rank: int) -> HostStatus | None:
    """The host whose worker holds ``rank``."""
    for host in view.hosts:
        if any(w.rank == rank and w.activity is Activity.TRAINING for w in host.workers):
            return host
    return None


def pids(process: Process) -> list[int]:
    """A daemon or launcher, and the process that stands for it if the prefix forks it."""
    return [pid for pid in _all_pids() if _group(pid) == process.pid]


async def kill(process: Process) -> None:
    """Kill -9 a daemon or launcher, and wait for its end."""
    _send_all(process, signal.SIGKILL)
    await process.wait()


def _send_all(process: Process, number: int) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


async def _stop_all(processes: Iterable[Process]) -> None:
    running = [p for p in processes if p.returncode is None]
    for process in running:
        # A stopped process would not receive SIGTERM.
        _send_all(process, signal.SIGCONT)
        send(process, signal.SIGTERM)
    for process in running:
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            await kill(process)

"""The stage of a story (one scenario file): a cluster and its surroundings, which can break.

It starts all processes and mounts, and ends or removes them when the context is left. The files
stay for the caller to compare.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from msgspec import structs

from tmd.campaign import faulty_detector
from tmd.campaign.clocks import Clocks
from tmd.campaign.environment import FOLDER, ORDERS, RELAY
from tmd.campaign.forking import NETWORK
from tmd.campaign.namespaces import Namespaces
from tmd.campaign.other_release import OtherRelease
from tmd.campaign.relay import LinkConditions, Relay, RelayedLinks
from tmd.campaign.scenario import FaultPart, JobPart, Network, ProcessKind, ServerKind, Story
from tmd.campaign.servers import Private, WithSentinel
from tmd.campaign.view_checks import followed, meant, rehearsed
from tmd.campaign.waiting import until
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import FINAL, ClusterView, WorkerStatus
from tmd.demo.cluster import ClusterSpec, Installation, LocalCluster, describe, ready, workers

JOB = Path(__file__).with_name("job.py")
UNLIMITED_RESTARTS = 1_000_000
LAST_FRACTION, LAST_STEPS = 0.1, 60
"""Once fewer steps than this fraction, or this number, are left before the one at which the job
waits, the other scenarios are played on a new cluster: on this one they might wait for steps in
vain."""


class CampaignStage:
    """One cluster and one job, for as many scenarios of a story as they last."""

    def __init__(
        self,
        story: Story,
        folder: Path,
        prefix: Sequence[str],
        other: OtherRelease | None = None,
    ) -> None:
        self.story = story
        self.folder = folder
        self.ranks = list(story.cluster.active)
        self.standbys = list(story.cluster.spare)
        self.marks = folder / "marks"
        self.control = {host: LinkConditions() for host in self.hosts}
        """Connections between each daemon and Redis."""
        self.links = RelayedLinks()
        """Connections between workers of two hosts, the dialling one first."""
        self.private: Private | None = None
        self.sentinel: WithSentinel | None = None
        self.networks: Namespaces | None = None
        self.clocks: Clocks | None = None
        self.other = None if other is None else other.installation(self._plugins)
        """Another release, if there is one."""
        self.raised: set[str] = set()
        """Ids of all alerts so far. A Redis that has lost its data gets them once more."""
        self._prefix = tuple(prefix)
        self._relay_ports: dict[tuple[str, str], int] = {}
        self._relay = Relay()
        self._orders: list[str] = []
        self._mounts: list[Path] = []
        self._stack = contextlib.AsyncExitStack()
        self.cluster: LocalCluster

    @property
    def hosts(self) -> list[str]:
        return [*self.ranks, *self.standbys]

    async def __aenter__(self) -> Self:
        self.marks.mkdir(parents=True)
        try:
            own = await self._surroundings()
            part = self.story.cluster
            faulty_detector.install(self._plugins)
            spec = ClusterSpec(
                folder=self.folder,
                redis=self._url(),
                job="campaign",
                active=tuple(self.ranks),
                standby=tuple(self.standbys),
                script=script(self.story),
                prefix=self._prefix,
                silence_s=part.silence_s,
                max_restarts=UNLIMITED_RESTARTS,
                restart_delay_s=0.0,
                more_config=part.config + "\n",
                own_config={host: self._faulty_detector(host) for host in self.hosts},
                environment={
                    FOLDER: str(self.marks),
                    "TMD_SHADOW__REHEARSE": str(part.rehearse).lower(),
                    "TMD_SHADOW__HOT": str(part.hot),
                    "TMD_DETECTORS__TRAINER__PROGRESS_TIMEOUT_S": str(part.hang_s),
                    # All hosts share this machine's cores, so step times mean nothing.
                    "TMD_DETECTORS__STRAGGLER__ENABLED": "false",
                    "PYTHONPATH": os.pathsep.join((str(self._plugins), *_python_path())),
                },
                own_environment=own,
                daemons_from=self._others(ProcessKind.DAEMONS),
                launchers_from=self._others(ProcessKind.WORKERS),
            )
            self.cluster = await self._stack.enter_async_context(LocalCluster(spec))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def _plugins(self) -> Path:
        return self.folder / "plugin"

    def _others(self, kind: ProcessKind) -> dict[str, Installation]:
        if self.other is None:
            return {}
        return dict.fromkeys(self.story.cluster.others(kind), self.other)

    # --- around the cluster -----------------------------------------------------------------------

    async def _surroundings(self) -> dict[str, dict[str, str]]:
        """Create the servers, relay, networks and clocks; returns the environment of each host."""
        part, stack = self.story.cluster, self._stack
        own: dict[str, dict[str, str]] = {host: {} for host in self.hosts}
        await stack.enter_async_context(self._relay)
        if part.redis is ServerKind.SENTINEL:
            self.sentinel = stack.enter_context(WithSentinel(self.folder / "redis"))
        else:
            self.private = stack.enter_context(Private(self.folder / "redis"))
            for host in self.hosts:
                path = self.folder / f"redis-{host}"
                await self._relay.unix(path, self.private.address, self.control[host])
                own[host]["TMD_REDIS__URL"] = f"unix://{path}"
        if part.network is Network.RELAYED:
            await self._relay.answering(self.folder / "ports", self._relay_port)
            for host in self.hosts:
                own[host][RELAY] = str(self.folder / "ports")
        elif part.network is Network.NAMESPACES:
            self.networks = stack.enter_context(Namespaces(self.hosts))
            for host in self.hosts:
                own[host][NETWORK] = self.networks.file_of(host)
                own[host]["TMD_HOST__ADVERTISE"] = self.networks.address(host)
        if part.clocks:
            self.clocks = Clocks(self.folder, self.hosts)
            for host in self.hosts:
                own[host] |= self.clocks.environment(host)
        return own

    def _url(self) -> str:
        server = self.sentinel or self.private
        assert server is not None
        return server.url

    async def _relay_port(self, question: str) -> str:
        """The port through which a worker on one host reaches an address on another."""
        near, far, address = question.split()
        conditions = self.links.between(near, far)
        if (near, address) not in self._relay_ports:
            self._relay_ports[near, address] = await self._relay.tcp(address, conditions)
        return str(self._relay_ports[near, address])

    def _faulty_detector(self, host: str) -> str:
        return (
            f'[detectors.{faulty_detector.NAME}]\nstrategy = "act"\n'
            f'orders = "{self.folder / f"faulty-{host}"}"\n'
        )

    # --- orders and marks -------------------------------------------------------------------------

    def order(self, name: str, fault: FaultPart, action: str) -> None:
        """Order ``action`` for the training process that reaches the fault's point, or a forward
        pass if it has none: in the next step of the fault's rank, or else in any process, of the
        fault's host if it names one."""
        who, step = fault.host or "*", "*"
        if fault.rank is not None:
            who, step = str(fault.rank), "+"
        self._orders.append(f"{name} {fault.point or 'forward'}@{who}:{step}={action}")
        draft = self.marks / "orders.new"
        draft.write_text("\n".join(self._orders))
        draft.replace(self.marks / ORDERS)

    def withdraw(self) -> None:
        """Withdraw all orders."""
        self._orders.clear()
        (self.marks / ORDERS).unlink(missing_ok=True)

    async def fired(self, name: str) -> float:
        """Wait for the fault of that name; returns the time of its strike."""
        mark = self.marks / f"{name}.fired"
        await until(mark.exists)
        return mark.stat().st_mtime

    def release(self, name: str) -> None:
        """Let a process go on that the fault ``name`` holds."""
        (self.marks / f"{name}.go").touch()

    def hurry(self) -> None:
        """Let the job run to its end without pauses."""
        (self.marks / "hurry.go").touch()

    # --- observation ------------------------------------------------------------------------------

    async def until(self, wanted: Callable[[ClusterView], bool]) -> ClusterView:
        """Wait without a limit for a view for which ``wanted`` holds."""
        async for view in self.cluster.views():
            if wanted(view):
                return view
        raise AssertionError("views do not end")

    async def whole(self, standbys: int | None = None) -> ClusterView:
        """Wait until all hosts report, one of them leads, all ranks train, the standbys wait or
        follow a rank, and no plan is live; if the story rehearses, until all standbys have.

        Raises:
            RuntimeError: all daemons have ended.
        """
        part = self.story.cluster
        spare = part.standbys if standbys is None else standbys
        hot = min(part.hot, spare)

        def quiet(view: ClusterView) -> bool:
            self._check_alive()
            plan = view.jobs[0].plan if view.jobs else None
            return (
                len(view.hosts) == len(self.hosts)
                and ready(view, len(self.ranks), spare - hot)
                and len(followed(view)) >= hot
                and (not part.rehearse or rehearsed(view))
                and (plan is None or plan.phase in FINAL)
            )

        while True:
            view = await self.until(quiet)
            with contextlib.suppress(StoreUnavailable):
                if await self.cluster.leader():
                    return view
            await asyncio.sleep(0.05)

    def _check_alive(self) -> None:
        """Raise if no daemon is left to wait for.

        Raises:
            RuntimeError: all have ended; the message quotes the last output of one.
        """
        if all(p.returncode is not None for p in self.cluster.daemons.values()):
            host = self.hosts[0]
            last = self.cluster.log(host).strip().splitlines()[-1:]
            raise RuntimeError(f"all daemons have ended; last line of {host}: {''.join(last)}")

    async def steps(self, count: int) -> None:
        """Wait until every rank has committed ``count`` steps more than the foremost has now."""
        view = await self.until(lambda v: bool(workers(v)))
        goal = max(w.step for w in workers(view)) + count
        await self.until(lambda v: ready(v, len(self.ranks), 0, goal))

    async def is_near_its_last_step(self) -> bool:
        """Whether the job might wait at its last step before another scenario is over."""
        view = await self.until(lambda v: bool(workers(v)))
        last = _last_step(self.story.job)
        return max(w.step for w in workers(view)) > last - max(LAST_FRACTION * last, LAST_STEPS)

    async def resolved(self, fault: FaultPart) -> FaultPart:
        """``fault``, with 'followed' replaced by the rank that a hot standby follows now."""
        if fault.where != "followed":
            return fault
        view = await self.until(lambda v: bool(followed(v)))
        return structs.replace(fault, where=f"rank {min(followed(view))}")

    async def targets(self, where: str) -> list[str]:
        """Wait for the hosts that ``where`` denotes."""
        word, _, named = where.partition(" ")
        leader = await self._leader() if word in ("leader", "follower") else ""
        match word:
            case "host":
                return [named]
            case "leader":
                return [leader]
            case "follower":
                return [next(host for host in self.hosts if host != leader)]
            case "all":
                return self.hosts
            case "half":
                view = await self.cluster.view()
                found = [w for w in workers(view) if w.rank is not None]
                return [w.worker.partition("/")[0] for w in found][: len(self.ranks) // 2 + 1]
        return [(await self.worker(where)).worker.partition("/")[0]]

    async def _leader(self) -> str:
        """Wait for a leader; returns its host."""
        async for _ in self.cluster.views():
            with contextlib.suppress(StoreUnavailable):
                if leader := await self.cluster.leader():
                    return leader.partition("#")[0]
        raise AssertionError("views do not end")

    async def target(self, where: str) -> str:
        return (await self.targets(where))[0]

    async def worker(self, where: str) -> WorkerStatus:
        """Wait for the worker that ``where`` denotes."""
        view = await self.until(lambda v: meant(v, where) is not None)
        status = meant(view, where)
        assert status is not None
        return status

    async def describe(self) -> str:
        with contextlib.suppress(StoreUnavailable):
            return describe(await self.cluster.view())
        return "Redis does not answer"

    # --- mending ----------------------------------------------------------------------------------

    def mount(self, place: Path, *options: str) -> None:
        """Mount at ``place``; it is removed at the latest when the story ends. Raises OSError."""
        done = subprocess.run(["mount", *options, str(place)], capture_output=True, check=False)
        if done.returncode:
            raise OSError(done.stderr.decode().strip())
        self._mounts.append(place)
        self._stack.callback(self.unmount, place)

    def unmount(self, place: Path) -> bool:
        """Remove the mount at ``place``; returns whether there was one."""
        if place not in self._mounts:
            return False
        self._mounts.remove(place)
        subprocess.run(["umount", "--lazy", str(place)], check=False)
        return True

    async def undrain(self) -> None:
        """Withdraw all requests to drain a host, so that every host may hold ranks again."""
        view = await self.until(lambda v: bool(v.jobs))
        for request in view.drains:
            await self.cluster.store.undrain(request.host)

    async def repair(self) -> None:
        """Restart ended processes, as systemd and an operator do."""
        for host, daemon in list(self.cluster.daemons.items()):
            if daemon.returncode is not None:
                await self.cluster.start_daemon(host)
        for host, launcher in list(self.cluster.launchers.items()):
            if launcher.returncode is not None:
                await self.cluster.start_launcher(host)


def _last_step(part: JobPart) -> int:
    """The step at which the job waits until it is hurried."""
    return part.steps - part.steps // 10


def script(story: Story) -> tuple[str, ...]:
    """The training script and its arguments; the undisturbed run has the same ones."""
    part = story.job
    last = _last_step(part)
    numbers = ("--steps", str(part.steps), "--pace", str(part.pace_s), "--last", str(last))
    return (str(JOB), *numbers, *part.arguments)


def now() -> float:
    """Seconds of the wall clock, as the times of files are."""
    return time.time()


def _python_path() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]

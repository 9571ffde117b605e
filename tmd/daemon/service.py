"""The daemon of one host: builds the parts, runs them, stops them.

The composition root: only this module knows all parts. Every root task runs in one TaskGroup. If
one fails, the process exits with an error and systemd restarts it. SIGTERM and SIGINT stop it
cleanly.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tmd.boot import boot_id
from tmd.config import Settings
from tmd.core.alerts.findings import LEADER, FindingRules
from tmd.core.alerts.store_health import StoreLoop
from tmd.core.values.errors import ConfigError, StoreUnavailable
from tmd.core.values.model import HostStatus, Signal, Strategy
from tmd.core.values.reasons import os_reason
from tmd.daemon.agent_socket import AgentSocket, uids_of
from tmd.daemon.agents import AgentServer
from tmd.daemon.bus import Store, Topic, Wake, WakeEvent
from tmd.daemon.candidate import Candidate, LeaderConfig
from tmd.daemon.foreign_code import stops_noticed
from tmd.daemon.health import HostHealth
from tmd.daemon.injections import Injections
from tmd.daemon.journal import Journal
from tmd.daemon.kept_exits import KeptExits
from tmd.daemon.leader import Leader
from tmd.daemon.plugins import load_detectors, load_policies
from tmd.daemon.publisher import HeartbeatSources, Publisher, PublisherConfig
from tmd.daemon.record_sync import LocalWorkers, RecordSync
from tmd.daemon.records import Records
from tmd.daemon.reload import Reloader
from tmd.daemon.roster import Roster
from tmd.daemon.store import open_store
from tmd.daemon.store_health import StoreHealth
from tmd.daemon.systemd import Notifier
from tmd.daemon.watcher import AlertSinks, Watcher
from tmd.daemon.webhook import Webhook, WebhookConfig

if TYPE_CHECKING:
    from tmd.daemon.web.server import Web

log = structlog.get_logger("tmd.daemon")


class Service:
    """All parts of one daemon. :meth:`run` owns everything that runs."""

    def __init__(
        self, settings: Settings, store: Store, lease_store: Store, file: Path | None
    ) -> None:
        host = settings.host
        self.incarnation = secrets.token_hex(4)
        self.store_health = StoreHealth()
        self.roster = Roster()
        self.kept_exits = KeptExits(self.roster, host.state_dir)
        self.records = Records(host.state_dir)
        self.journal = Journal(host.state_dir / "alerts.sqlite")
        self.watcher = Watcher(
            host.name,
            self.incarnation,
            load_detectors(settings),
            self.roster,
            AlertSinks(store, self.store_health, self.journal),
        )
        switch = settings.inject.enabled
        self.injections = Injections(
            host.name, switch, file, self.watcher, self.roster, self.journal
        )
        self.agents = AgentServer(
            _door(settings), self.roster, self.records, self.injections, self.kept_exits.keep
        )
        self.health = HostHealth(host.name, self.watcher, store, self.store_health, host.state_dir)
        self.publisher = Publisher(
            PublisherConfig(
                host.name, self.incarnation, boot_id(), host.standby, host.heartbeat_s, host.ttl_s
            ),
            HeartbeatSources(
                self.roster,
                self.watcher,
                self.records,
                lambda: self.leader.counter.ledger.unwritten(),
            ),
            store,
            self.store_health,
        )
        config = _leader_config(settings, HostStatus(host.name, self.incarnation).listener)
        self.candidate = Candidate(lease_store, config, self.records, self.store_health)
        self.leader = Leader(
            store, config, self.candidate, load_policies(settings), self.store_health, self._report
        )
        self.record_sync = self._record_sync(settings, store)
        self.web = self._web(settings, store)
        self.webhook = _webhook(settings, self.candidate, store, self.store_health)
        self._settings = settings
        self._store = store

    async def run(self, stop: asyncio.Event, notifier: Notifier, reloader: Reloader) -> None:
        """Run until ``stop`` is set, then give the lease back and remove the socket."""
        async with asyncio.TaskGroup() as group:
            # They are cancelled in the opposite order.
            roots = [
                group.create_task(self.kept_exits.run(), name="exits"),
                group.create_task(self.agents.serve(), name="agents"),
                group.create_task(self.watcher.run(), name="watcher"),
                group.create_task(self.injections.run(), name="injections"),
                group.create_task(self.health.run(), name="health"),
                group.create_task(self.publisher.run(), name="publisher"),
                group.create_task(self.record_sync.run(), name="record_sync"),
                group.create_task(self._wakes(), name="wakes"),
                group.create_task(reloader.run(), name="reload"),
                group.create_task(_sign_of_life(notifier), name="life"),
            ]
            if self._settings.leader.candidate:
                roots.append(group.create_task(self.candidate.run(), name="lease"))
                roots.append(group.create_task(self.leader.run(), name="leader"))
                if self.webhook is not None:
                    roots.append(group.create_task(self.webhook.run(), name="webhook"))
            if self.web is not None:
                roots.append(group.create_task(self.web.run(), name="http"))
                await self.web.listening.wait()
            await self.agents.listening.wait()
            notifier.ready(f"serving {self._settings.host.socket}")
            log.info("daemon started", socket=str(self._settings.host.socket))
            await stop.wait()
            notifier.stopping()
            log.info("daemon stops, training continues")
            for task in reversed(roots):
                task.cancel()

    def _record_sync(self, settings: Settings, store: Store) -> RecordSync:
        return RecordSync(
            store,
            self.store_health,
            LocalWorkers(self.records, self.agents, self.roster),
            poll_s=settings.leader.poll_s,
            leads=lambda: self.candidate.leading,
            report=self._report,
        )

    def _report(self, found: Signal) -> None:
        """Raise or clear, on this host, a finding of the leader or of the reader of records."""
        rules = FindingRules(hold_s=self._settings.leader.unprotected_s)
        self.watcher.fold(found, LEADER, Strategy.ADVISE, rules)

    def _web(self, settings: Settings, store: Store) -> Web | None:
        address = settings.http.address
        if address is None:
            return None
        # Imported only when used: it costs a daemon memory and start-up time.
        from tmd.daemon.web.page_samples import History
        from tmd.daemon.web.parts import Local, WebParts
        from tmd.daemon.web.server import Web

        def local() -> Local:
            return Local(
                cluster=settings.cluster.name,
                status=self.publisher.status(),
                serving=self.agents.listening.is_set(),
                leading=self.candidate.leading,
                lease=self.candidate.lease,
                alerts=self.watcher.counter,
                jobs=self.leader.counter,
                view=self.leader.view,
                store=self.store_health.state,
            )

        host = settings.host
        names = frozenset(
            n.lower() for n in (address[0], host.name, host.advertise, *settings.http.names)
        )
        return Web(address, WebParts(store, local, settings.http.token(), names, History()))

    async def _wakes(self) -> None:
        """Ring the wake events. A missed wake-up delays work by at most one period."""
        while True:
            try:
                async for wake in self._store.wakes(self.candidate.holder):
                    self.store_health.worked(StoreLoop.WAKE_UPS)
                    self._ring(wake)
            except StoreUnavailable as error:
                await self.store_health.failed(StoreLoop.WAKE_UPS, error)

    def _ring(self, wake: Wake) -> None:
        match wake.topic:
            case Topic.HOST | Topic.LEADER:
                self.leader.hear(wake)
            case Topic.JOBS:
                if not wake.about or wake.about in self.roster.jobs:
                    self.record_sync.wake()
            case Topic.HEALTHY:
                if wake.about in ("", self._settings.host.name):
                    self.health.bell.ring()
            case Topic.LEASE:
                self.candidate.vacant.ring()
            case Topic.ALL:
                # A store that is back may be empty: this host looks whether its records and alerts
                # are there.
                self.leader.hear(wake)
                self.record_sync.wake_for_all()
                self.watcher.posted.ring()
                self.health.bell.ring()


def _leader_config(settings: Settings, holder: str) -> LeaderConfig:
    return LeaderConfig(
        holder=holder,
        ttl_s=settings.leader.ttl_s,
        renew_s=settings.leader.renew_s,
        poll_s=settings.leader.poll_s,
        limits=settings.limits.limits(),
        shadow_goals=settings.shadow.goals(),
        breaker=settings.breaker.rules(),
        may_lead=settings.leader.candidate,
        list_ended_s=settings.leader.list_ended_h * 3600,
    )


def _door(settings: Settings) -> AgentSocket:
    return AgentSocket(
        path=settings.host.socket,
        host=settings.host.name,
        uids=uids_of(settings.host.users),
        key_of=settings.job_keys(),
        shadow=settings.shadow.limits(),
    )


def _webhook(
    settings: Settings, candidate: Candidate, store: Store, store_health: StoreHealth
) -> Webhook | None:
    section = settings.webhook
    if section.url is None:
        return None
    config = WebhookConfig(
        cluster=settings.cluster.name,
        url=section.url,
        headers=section.headers,
        alerts="alerts" in section.events,
        migrations="migrations" in section.events,
        timeout_s=section.timeout_s,
    )
    return Webhook(config, candidate, store, store_health)


async def _sign_of_life(notifier: Notifier) -> None:
    """Notify systemd while the loop runs; systemd restarts a daemon that stops doing so."""
    while True:
        await asyncio.sleep((notifier.watchdog_s or 60.0) / 3)
        notifier.alive()


async def serve(settings: Settings, read: Callable[[], Settings], file: Path | None = None) -> None:
    """Run the daemon of this host until SIGTERM or SIGINT. On SIGHUP ``read`` returns new settings
    from ``file``.

    Raises:
        ConfigError: a setting cannot be used on this host.
    """
    _own_folder(settings.host.state_dir)
    store = open_store(settings)
    lease_store = open_store(settings, min(settings.redis.timeout_s, settings.leader.answer_s))
    notifier = Notifier()
    try:
        service = Service(settings, store, lease_store, file)
        try:
            reloader = Reloader(
                settings, read, service.watcher, service.leader, service.injections, notifier
            )
            with _signals(reloader.asked) as stop:
                await service.run(stop, notifier, reloader)
        finally:
            service.journal.close()
    except BaseExceptionGroup as group:
        wrong: BaseException | None = group.subgroup(ConfigError)
        while isinstance(wrong, BaseExceptionGroup):
            wrong = wrong.exceptions[0]
        raise wrong or group from None
    finally:
        notifier.close()
        await store.close()
        await lease_store.close()


def _own_folder(folder: Path) -> None:
    """Create the state folder for this user alone and close the permissions of files already in it.

    Raises:
        ConfigError: the folder cannot be used.
    """
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        for file in folder.iterdir():
            mode = file.lstat().st_mode
            if stat.S_ISREG(mode) and mode & 0o077:
                file.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"[host] state_dir {folder}: {os_reason(error)}") from None


@contextmanager
def _signals(hangup: WakeEvent) -> Iterator[asyncio.Event]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    handlers = {signal.SIGTERM: stop.set, signal.SIGINT: stop.set, signal.SIGHUP: hangup.ring}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        with stops_noticed():
            yield stop
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)

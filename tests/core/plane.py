"""The control plane around the simulation: a store that loses writes, daemons, stalling leaders.

The store behaves as the Lua scripts make Redis behave, and has a replica. A daemon leads if it
holds the lease or still believes so, decides on its last reading, and writes some time later.
Workers receive directives only from the daemon of their host.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from msgspec import structs

from tests.core.simulation import Simulation
from tests.core.workers import JOB
from tmd.core.planning.deadlines import Seen, seen
from tmd.core.planning.directives import Directive, directive_of
from tmd.core.planning.election import Receipt, received
from tmd.core.planning.forming import form
from tmd.core.planning.planning import steer
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import ClusterView, JobRecord, WorkerStatus


@dataclass(frozen=True)
class Redis:
    """All stored values."""

    record: JobRecord | None = None
    fence: int = 0
    holder: str = ""
    lease: int = 0
    """Lease epoch of the holder, or of the last one."""
    hosts: frozenset[str] = frozenset()
    """Hosts with a heartbeat."""
    statuses: dict[str, WorkerStatus] = field(default_factory=dict)


@dataclass
class Daemon:
    """The memory of one host's daemon; ``obeyed`` survives a restart."""

    host: str
    known: JobRecord | None = None
    obeyed: int = 0
    lease: int = 0
    """The lease epoch under which it believes that it leads; 0 for none."""
    latest: int = 0
    """The highest lease epoch granted to it since its start."""
    seen: Seen | None = None
    decided: tuple[int, JobRecord] | None = None
    """A pending write, and the revision that it expects."""


@dataclass
class Orders:
    """Directives that one worker has not read yet, and the highest lease epoch it obeyed."""

    unread: list[tuple[int, Directive]] = field(default_factory=list)
    obeyed: int = 0


class Plane(Simulation):
    """Each method is one event. No message arrives unless a rule delivers it."""

    def __init__(self, ranks: int, standbys: int, *, hot: int | None = None) -> None:
        self.redis = Redis()
        self.replica = self.redis
        self.daemons: dict[str, Daemon] = {}
        self.orders: dict[str, Orders] = {}
        self.writers: dict[int, str] = {}
        self.clock = 0
        self.now = 0.0
        super().__init__(ranks, standbys, hot=hot)

    def daemon(self, host: str) -> Daemon:
        return self.daemons.setdefault(host, Daemon(host))

    def inbox(self, name: str) -> Orders:
        return self.orders.setdefault(name, Orders())

    # --- leading ----------------------------------------------------------------------------------

    def ask(self, host: str) -> None:
        """A candidate asks for the lease, or renews it: ``lua.ACQUIRE``."""
        daemon, redis = self.daemon(host), self.redis
        self.clock += 1
        floor = max(daemon.obeyed, daemon.latest)
        if redis.holder == host and redis.lease >= floor:
            daemon.lease = redis.lease
        elif redis.holder in ("", host):
            daemon.lease = max(redis.lease, floor, self.clock) + 1
            self.redis = replace(redis, holder=host, lease=daemon.lease)
        else:
            daemon.lease = 0
        daemon.latest = max(daemon.latest, daemon.lease)

    def lapse(self) -> None:
        """The lease expires; its holder may not know it yet."""
        self.redis = replace(self.redis, holder="")

    def decide(self, host: str) -> None:
        """A daemon that believes it leads reads and decides; the write is pending."""
        daemon = self.daemon(host)
        if not daemon.lease:
            return
        self.record, self.published = self.redis.record, dict(self.redis.statuses)
        before, view = self.record, self.view()
        if before is None:
            after = form(view, JOB)
        else:
            daemon.seen = seen(daemon.seen, view, before, self.now, PlanLimits().unheard_s)
            after = steer(
                before,
                view,
                self.verdicts(),
                now=0.0,
                age=daemon.seen.age(self.now),
                limits=PlanLimits(),
                wanted=self.wanted,
                silences=daemon.seen.silences(self.now),
            )
        if after is not None and after is not before:
            after = structs.replace(after, lease_epoch=daemon.lease)
            daemon.decided = (before.revision if before else 0, after)

    def write(self, host: str) -> bool:
        """The write reaches the store: ``lua_records.PUT_JOB``. Returns whether it was accepted."""
        daemon, redis = self.daemon(host), self.redis
        if daemon.decided is None:
            return False
        (expected, record), daemon.decided = daemon.decided, None
        if record.lease_epoch < redis.fence:
            daemon.lease = 0
            return False
        if expected != (redis.record.revision if redis.record else 0):
            return False
        writer = self.writers.setdefault(record.lease_epoch, host)
        assert writer == host, "two leaders wrote under one lease epoch"
        self.redis = replace(redis, record=record, fence=record.lease_epoch)
        return True

    def turn(self, age: float = 0.0) -> bool:
        """The holder of a valid lease reads, decides and writes at once."""
        leader = self.redis.holder or "h0"
        self.ask(leader)
        self.decide(leader)
        self.now += age
        return self.write(leader)

    # --- the store --------------------------------------------------------------------------------

    def publish(self, name: str) -> None:
        super().publish(name)
        hosts, told = self.redis.hosts | {self.workers[name].host}, self.redis.statuses
        if name in self.published:
            told = {**told, name: self.published[name]}
        self.redis = replace(self.redis, hosts=hosts, statuses=told)

    def view(self) -> ClusterView:
        view = super().view()
        return structs.replace(
            view, hosts=tuple(h for h in view.hosts if h.host in self.redis.hosts)
        )

    def wait(self) -> None:
        """A long time: every host has reported and read meanwhile."""
        for name, worker in self.workers.items():
            self.publish(name)
            self.read(worker.host)
        self.now += 100.0

    def copy_to_replica(self) -> None:
        self.replica = self.redis

    def fail_over(self) -> None:
        """The replica takes over; writes that it had not received are lost."""
        self.redis = self.replica

    def wipe(self) -> None:
        """Restarted empty."""
        self.redis = Redis()

    def remembered(self) -> int:
        """The highest revision that some daemon could restore."""
        return max((d.known.revision for d in self.daemons.values() if d.known), default=0)

    # --- hosts ------------------------------------------------------------------------------------

    def read(self, host: str) -> None:
        """The daemon reads the record, and restores lost writes: ``lua_records.RESTORE_JOB``."""
        daemon, redis = self.daemon(host), self.redis
        receipt = received(redis.record, daemon.known, daemon.obeyed) if redis.record else None
        if receipt is Receipt.NEW:
            assert redis.record is not None
            assert redis.record.lease_epoch >= daemon.obeyed, "I5: an older leader is obeyed"
            daemon.known, daemon.obeyed = redis.record, redis.record.lease_epoch
        mine = daemon.known
        stored = redis.record.revision if redis.record else 0
        if receipt in (None, Receipt.OLDER) and mine is not None and stored < mine.revision:
            fence = max(redis.fence, mine.lease_epoch)
            self.redis = replace(redis, record=mine, fence=fence)

    def restart(self, host: str) -> None:
        """A daemon restarts; trainers reconnect and unread messages are lost."""
        daemon = self.daemon(host)
        self.daemons[host] = Daemon(host, obeyed=daemon.obeyed)
        for worker in self.workers.values():
            if worker.host == host:
                self.inbox(worker.name).unread.clear()

    def send(self, name: str) -> None:
        """The daemon of the host sends the directive that follows from its record."""
        daemon = self.daemon(self.workers[name].host)
        if daemon.known is not None:
            order = (daemon.known.lease_epoch, directive_of(daemon.known, name))
            self.inbox(name).unread.append(order)

    def hear(self, name: str) -> None:
        """The worker reads the next directive."""
        worker, inbox = self.workers[name], self.inbox(name)
        if not inbox.unread:
            return
        lease, order = inbox.unread.pop(0)
        if not worker.alive or lease < inbox.obeyed:
            return
        inbox.obeyed = lease
        # A voted rank is assumed before the next directive is read.
        self.boundary(name)
        self._obey(worker, order)

    def deliver(self, name: str) -> None:
        """All pending directives of the worker arrive."""
        self.read(self.workers[name].host)
        self.send(name)
        while self.inbox(name).unread:
            self.hear(name)

    # --- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        # The store may go back, together with Redis; workers may not.
        self.record = None
        super().check()

    def settle(self, rounds: int = 60) -> None:
        for daemon in self.daemons.values():
            if daemon.host != self.redis.holder:
                daemon.lease, daemon.decided = 0, None
        super().settle(rounds)
        self.record = self.redis.record

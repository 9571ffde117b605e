"""A cluster without IO: the real decisions of leader and workers, and a model of their effects.

A worker's *state* is the tuple of steps it has applied, so that equal states mean equal numbers.
Statuses and records reach the other side only on demand: late, repeated, or never.
"""

from __future__ import annotations

from msgspec import structs

from tests.core.workers import JOB, SHADOWS, Worker
from tmd.core.planning.directives import (
    Arm,
    Directive,
    Hold,
    Prepare,
    Resume,
    ShadowRank,
    Sync,
    Train,
    Wait,
    directive_of,
)
from tmd.core.planning.forming import form
from tmd.core.planning.planning import steer
from tmd.core.values.limits import PlanLimits, ShadowGoals
from tmd.core.values.model import (
    READABLE_VERSION,
    Activity,
    ClusterView,
    Exit,
    HostStatus,
    JobRecord,
    MigrationPlan,
    Urgency,
    Verdict,
    WorkerStatus,
)
from tmd.core.values.requests import DrainRequest
from tmd.core.values.snapshots import Kept, keepers
from tmd.core.worker.responses import Response
from tmd.core.worker.transitions import WorkerTransition


class Simulation:
    """Real decisions, modelled workers. Each method is one event."""

    def __init__(
        self,
        ranks: int,
        standbys: int,
        *,
        hot: int | None = None,
        alike: bool = True,
        elastic: bool = False,
    ) -> None:
        """``hot``: joiners shadow, with this many hot standbys; ``None``: stop-and-copy.

        ``alike``: all ranks are replicas; otherwise each state is unique. ``elastic``: the script
        lets ranks be adopted.
        """
        self.elastic = elastic
        self.ranks = ranks
        self.alike = tuple(range(ranks)) if alike else ()
        self.follow = hot is not None
        self.wanted = ShadowGoals(hot=hot or 0)
        self.workers = {
            f"w{i}": Worker(f"w{i}", f"h{i}", ranks, self.alike) for i in range(ranks + standbys)
        }
        self.spares = {f"h{i}" for i in range(ranks, ranks + standbys)}
        self.published: dict[str, WorkerStatus] = {}
        self.exits: list[Exit] = []
        self.record: JobRecord | None = None
        self.shrunk = 0
        """Votes of fewer workers than ranks."""
        self.drains: set[str] = set()
        self.drain_count = 0
        self.committed_in: dict[int, int] = {}
        self.last_epoch = 0
        self.log: list[tuple[int, int]] = []
        for worker in self.workers.values():
            self.publish(worker.name)
        self.turn()
        for name in self.workers:
            self.deliver(name)
            self.publish(name)

    @property
    def plans(self) -> tuple[MigrationPlan, ...]:
        """All plans that were ever opened."""
        if self.record is None:
            return ()
        plan = self.record.plan
        return self.record.history if plan is None else (*self.record.history, plan)

    @property
    def plan(self) -> MigrationPlan:
        """The newest plan of a job that has had one."""
        assert self.record is not None
        assert self.record.plan is not None
        return self.record.plan

    # --- the control plane ------------------------------------------------------------------------

    def drain(self, host: str) -> None:
        """The operator drains this host, and no other."""
        self.drains = {host}
        self.drain_count += 1

    def view(self) -> ClusterView:
        hosts = []
        for worker in self.workers.values():
            known = self.published.get(worker.name)
            exits = tuple(e for e in self.exits if e.worker == worker.name)
            hosts.append(
                HostStatus(
                    host=worker.host,
                    incarnation="1",
                    standby=worker.host in self.spares,
                    workers=(known,) if known and not exits else (),
                    exits=exits,
                    reads=READABLE_VERSION,
                )
            )
        drains = tuple(
            DrainRequest(host=h, id=f"{h}-{self.drain_count}") for h in sorted(self.drains)
        )
        jobs = () if self.record is None else (self.record,)
        return ClusterView(hosts=tuple(hosts), jobs=jobs, drains=drains)

    def verdicts(self) -> list[Verdict]:
        assert self.record is not None
        found = []
        parties = list(self.record.membership.members)
        for member in parties:
            if any(e.worker == member.worker and e.code for e in self.exits):
                found.append(Verdict(JOB, member.worker, Urgency.FAILED, "trainer.exited", "died"))
            found.extend(
                Verdict(JOB, member.worker, Urgency.DRAIN, "drain", "", request=request.id)
                for request in self.view().drains
                if request.host == member.host and not self.record.served(request)
            )
        return found

    def turn(self, age: float = 0.0) -> bool:
        """One round of the leader; returns whether it changed anything."""
        view = self.view()
        if self.record is None:
            self.record = form(view, JOB)
            return self.record is not None
        after = steer(
            self.record,
            view,
            self.verdicts(),
            now=0.0,
            age=age,
            limits=PlanLimits(),
            wanted=self.wanted,
        )
        changed = after is not self.record
        if changed:
            assert after.revision == self.record.revision + 1
        self.record = after
        return changed

    def publish(self, name: str) -> None:
        """The worker's report reaches the daemon, and the daemon's report the store."""
        worker = self.workers[name]
        if worker.alive:
            status = worker.status
            self.published[name] = structs.replace(status, elastic="" if self.elastic else None)

    # --- what happens to workers ------------------------------------------------------------------

    def kill(self, name: str) -> None:
        worker = self.workers[name]
        worker.alive = False
        self.lose_life(name)
        self.exits.append(Exit(name, JOB, -9, 0.0))
        for peer in self.workers.values():
            # Broken links poison the step of all workers that share an epoch with the dead one.
            if peer.alive and self._trains(peer) and peer.status.epoch == worker.status.epoch:
                peer.poisoned = True

    def cut(self) -> None:
        """A link breaks without a dead worker."""
        for worker in self.workers.values():
            if worker.alive and self._trains(worker):
                worker.poisoned = True
                self.lose_life(worker.name)

    def lose_life(self, source: str) -> None:
        """Shadows of ``source`` receive nothing more."""
        for worker in self.workers.values():
            if worker.life is not None and worker.life.directive.source.worker == source:
                worker.life.lost = True

    def add_standby(self, name: str) -> None:
        worker = Worker(name, f"host-{name}", self.ranks, self.alike)
        self.workers[name] = worker
        self.spares.add(worker.host)

    def step(self, aware: set[int] | None = None) -> bool:
        """All ranks of the newest epoch vote. ``aware``: the ranks that learn the outcome when a
        link breaks in the vote (``None``: all do). Returns whether there was a vote."""
        voters = self._voters()
        if voters is None:
            return False
        armed = {w.arm.membership.epoch if w.arm else 0 for w in voters.values()}
        agreed = armed.pop() if len(armed) == 1 else 0
        for rank, worker in voters.items():
            if aware is None or rank in aware:
                self._commit(worker, agreed)
            else:
                worker.poisoned = True
                worker.arm = None
                worker.say(WorkerTransition.HALTED, undecided=True, plan="", armed=0)
        if aware is not None and aware != set(voters):
            for worker in voters.values():
                worker.poisoned = True
        return True

    def boundary(self, name: str) -> None:
        """A worker between two steps: switch, or notice that the step broke."""
        worker = self.workers[name]
        if worker.alive and worker.life is not None and worker.life.won:
            directive = worker.take_over()
            peers = [self.workers[m.worker] for m in directive.membership.members]
            worker.poisoned = any(p.poisoned or not p.alive for p in peers)
        if not worker.alive or worker.status.activity is not Activity.TRAINING:
            return
        if worker.switch is not None:
            order, worker.switch = worker.switch, None
            if order.membership.rank_of(name) is not None:
                worker.held = order.membership.held_by(name)
                worker.say(epoch=order.membership.epoch, armed=0, plan="")
            else:
                worker.say(WorkerTransition.GAVE_AWAY, armed=0, plan=order.plan)
        elif worker.poisoned:
            worker.arm = None
            worker.say(WorkerTransition.HALTED, undecided=False, plan="", armed=0)

    def deliver(self, name: str) -> None:
        """The worker receives its directive under the current record and acts on it."""
        worker = self.workers[name]
        if not worker.alive or self.record is None:
            return
        if worker.switch is None:
            # A voted rank is assumed before the next directive is read, but between a vote and its
            # boundary a member reads any directive.
            self.boundary(name)
        self._obey(worker, directive_of(self.record, name))

    def snapshot(self, aware: set[int] | None = None) -> None:
        """Of this step: every rank has its own copy; keepers have those of ``aware``, or of all.

        In the latter case a vote reports it, and older ones are dropped.
        """
        voters = self._voters()
        if voters is None:
            return
        held = keepers([voters[rank].host for rank in range(self.ranks)])
        step = voters[0].status.step
        for rank, worker in voters.items():
            assert worker.state is not None
            copy = {Kept(rank, step): worker.state}
            worker.keep({**worker.copies, **copy})
            if aware is None or rank in aware:
                keeper = voters[held[rank]]
                keeper.keep({**keeper.copies, **copy})
        if aware is None:
            for worker in voters.values():
                worker.only(step)

    def _commit(self, worker: Worker, agreed: int) -> None:
        assert worker.state is not None
        step, epoch = worker.status.step, worker.status.epoch
        newest = max(self.committed_in, default=0)
        back = any(p.rollback for p in self.plans)
        assert epoch >= newest or back or step < self.committed_in[newest], "I4: in an old epoch"
        self.committed_in[epoch] = max(self.committed_in.get(epoch, 0), step + 1)
        worker.state = (*worker.state, step)
        worker.say(step=step + 1, undecided=False)
        if agreed and worker.arm is not None and worker.arm.membership.epoch == agreed:
            worker.switch = worker.arm
        worker.arm = None if worker.switch else worker.arm
        if not worker.poisoned:
            for other in self.workers.values():
                if other.life is not None and other.life.directive.source.worker == worker.name:
                    other.life.mirrored(worker.state, agreed if worker.switch else 0)
                    other.say(step=step + 1)

    def _voters(self) -> dict[int, Worker] | None:
        training = [
            w
            for w in self.workers.values()
            if w.alive and self._trains(w) and not w.poisoned and w.switch is None
        ]
        newest = max((w.status.epoch for w in training), default=0)
        present = [w for w in training if w.status.epoch == newest]
        voters = {w.status.rank: w for w in present if w.status.rank is not None}
        steps = {w.status.step for w in voters.values()}
        computed = sorted(rank for worker in voters.values() for rank in worker.held)
        if computed != list(range(self.ranks)) or len(steps) != 1:
            return None
        self.shrunk += len(voters) < self.ranks
        return voters

    def _trains(self, worker: Worker) -> bool:
        return worker.status.activity is Activity.TRAINING

    # --- what a worker's responses do to its state ------------------------------------------------

    def _obey(self, worker: Worker, order: Directive) -> None:
        match worker.respond(order), order:
            case None, _:
                self._go_on(worker)
            case Response.ENTER, Train() | Resume():
                worker.state = () if worker.status.activity is Activity.STARTING else worker.state
                worker.poisoned = False
                epoch = order.membership.epoch
                worker.held = order.membership.held_by(worker.name)
                worker.say(WorkerTransition.ENTERED, rank=order.rank, epoch=epoch)
            case Response.WARM_UP | Response.STAND_BY, _:
                worker.stand_by()
            case Response.SHADOW, ShadowRank():
                worker.shadow(order)
            case Response.PREPARE, Prepare():
                if self.follow:
                    worker.shadow(order)
                elif order.adopted:
                    worker.say(WorkerTransition.REFUSED, plan=order.plan)
                else:
                    worker.under = order
                    worker.say(WorkerTransition.PREPARED, plan=order.plan)
            case Response.CANCEL, _:
                worker.stop_shadowing()
            case Response.REPLACE, Sync():
                self._replace(worker, order)
            case Response.ARM | Response.DISARM | Response.HALT, _ if worker.switch is not None:
                # A voted switch is not withdrawn, but its epoch may be poisoned already.
                worker.poisoned = worker.poisoned or isinstance(order, Hold)
            case Response.ARM, Arm():
                if not worker.poisoned:
                    worker.arm = order
                    worker.say(armed=order.membership.epoch, plan=order.plan)
            case Response.DISARM, Train() | Wait():
                worker.arm = None
                plan = order.dropped if isinstance(order, Train) else worker.status.plan
                worker.say(armed=0, plan=plan)
            case Response.HALT, Hold() | Sync():
                worker.poisoned, worker.arm = True, None
                worker.say(WorkerTransition.HALTED, undecided=False, plan=order.plan, armed=0)
            case Response.ACKNOWLEDGE, Hold():
                worker.say(plan=order.plan)
            case Response.SYNC, Sync():
                self._sync(worker, order)
            case Response.EXIT, _:
                worker.alive = False
            case response, _:
                raise AssertionError(f"{response} on {order}: nothing finishes in this simulation")

    def _go_on(self, worker: Worker) -> None:
        """No new directive has arrived."""
        if worker.status.activity in SHADOWS:
            worker.go_on_shadowing()
        elif worker.status.activity is Activity.PREPARED:
            assert isinstance(worker.under, Prepare)
            self._receive(worker, worker.under)

    def _receive(self, worker: Worker, order: Prepare) -> None:
        """Receive the whole state, once the leaver has handed over its rank."""
        for source in self.workers.values():
            given = source.status.activity is Activity.LEFT and source.status.plan == order.plan
            if source.alive and given and source.status.rank == order.rank:
                worker.state, worker.under = source.state, None
                worker.held = order.membership.held_by(worker.name)
                worker.say(
                    WorkerTransition.TOOK_OVER,
                    rank=order.rank,
                    epoch=order.membership.epoch,
                    step=source.status.step,
                )
                # Peers of the new epoch may have halted meanwhile.
                peers = [self.workers[m.worker] for m in order.membership.members]
                worker.poisoned = any(p.poisoned or not p.alive for p in peers)

    def _sync(self, worker: Worker, order: Sync) -> None:
        """A survivor rolls forward, or returns to a snapshot."""
        worker.only(order.whole)
        if order.back:
            self._go_back(worker, order)
            return
        if worker.status.undecided and order.resume == worker.status.step + 1:
            self._commit(worker, 0)
        assert worker.status.step == order.resume
        self._synced_as(worker, order)

    def _replace(self, worker: Worker, order: Sync) -> None:
        """A joiner has the state of a lost rank from its shadow, or from a replica."""
        worker.only(order.whole)
        if order.back:
            self._go_back(worker, order)
            return
        if worker.life is not None and worker.life.state == tuple(range(order.resume)):
            worker.state = worker.life.state
            self._synced_as(worker, order)
            return
        move = next(m for m in order.moves if m.rank == order.rank)
        assert move.source is not None
        source = self.workers[move.source.worker]
        if source.alive and source.status.activity is Activity.SYNCED:
            worker.state = source.state
            self._synced_as(worker, order)

    def _go_back(self, worker: Worker, order: Sync) -> None:
        own = Kept(order.rank, order.resume)
        source = next((m.source for m in order.moves if m.rank == order.rank), None)
        if own not in worker.copies and source is not None:
            # In a separate thread: the source need not be synced itself.
            there = self.workers[source.worker]
            if not there.alive or own not in there.copies:
                return
            worker.keep({**worker.copies, own: there.copies[own]})
        worker.state = worker.copies[own]
        self._synced_as(worker, order)

    def _synced_as(self, worker: Worker, order: Sync) -> None:
        joins = worker.status.activity is Activity.STANDBY
        worker.life, worker.under = None, order
        worker.say(
            WorkerTransition.SYNCED,
            plan=order.plan,
            rank=order.rank,
            step=order.resume,
            undecided=False,
            epoch=0 if joins else worker.status.epoch,
            shadow=None,
        )

    # --- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        """Invariants of docs/how/design.md that are visible from outside."""
        training = [w for w in self.workers.values() if w.alive and self._trains(w)]
        for worker in training:
            assert worker.state == tuple(range(worker.status.step)), "a step lost or applied twice"
        newest = max((w.status.epoch for w in training), default=0)
        holders = [w.status.rank for w in training if w.status.epoch == newest]
        assert len(holders) == len(set(holders)), "I2: two owners of a rank in one epoch"
        if self.record is not None:
            assert self.record.membership.epoch >= self.last_epoch, "I3: the epoch went back"
            self.last_epoch = self.record.membership.epoch
            assert self.record.membership.size == self.ranks, "I2: a rank was lost"
            members = self.record.membership
            owners = [members.members[rank].worker for rank in members.crew(range(self.ranks))]
            assert len(owners) == len(set(owners)), "I2: a worker owns two ranks"
            held = [rank for owner in owners for rank in members.held_by(owner)]
            assert sorted(held) == list(range(self.ranks)), "I2: nobody computes for a rank"
            assert self.elastic or not members.adopted, "a rank is adopted that must not be"

    def settle(self, rounds: int = 60) -> None:
        """Deliver and obey all messages until nothing changes any more."""
        for number in range(rounds):
            for name in list(self.workers):
                self.boundary(name)
                self.deliver(name)
                self.boundary(name)
                self.publish(name)
            # Sometimes longer than the leader waits for any report.
            self.turn(age=11.0 if number % 20 == 19 else 1.0)
            self.check()

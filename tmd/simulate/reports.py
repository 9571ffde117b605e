"""What the workers of a simulated cluster report: the snapshot on which the leader decides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from msgspec import Struct, structs

from tmd.core.planning.migration import is_live
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.model import (
    Activity,
    Alert,
    ClusterView,
    Exit,
    HostStatus,
    JobRecord,
    MigrationPlan,
    Phase,
    PlanKind,
    ShadowStatus,
    WorkerStatus,
)
from tmd.core.values.requests import DrainRequest
from tmd.core.values.snapshots import Kept
from tmd.simulate.values import Job

JOB = "job"


class Machine(Struct):
    """A host that is up."""

    worker: str = ""
    """Its worker, or empty while none runs."""
    ended: tuple[Exit, ...] = ()
    alerts: tuple[Alert, ...] = ()
    follows_from: float = 0.0
    """Time from which its shadow is in step."""
    ready: bool = False
    """Whether its worker has done what the plan asks for."""


class Situation(Struct):
    """All that the reports follow from."""

    job: Job
    snapshot_steps: int
    """Steps between two snapshots; 0 for none."""
    machines: dict[str, Machine] = {}
    record: JobRecord | None = None
    drains: dict[str, DrainRequest] = {}
    breaker: Breaker = Breaker()
    now: float = 0.0
    step: int = 0
    halted: int | None = None
    """The step at which the survivors have halted; ``None`` while the job trains."""
    snapshot: int = 0
    """The step at which the epoch took its first snapshot."""

    @property
    def plan(self) -> MigrationPlan | None:
        """The live plan."""
        record = self.record
        return record.plan if record is not None and is_live(record.plan) else None

    @property
    def reached(self) -> int:
        """The step that workers report."""
        return self.step if self.halted is None else self.halted

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Ranks of equal state."""
        size = self.job.replica_hosts
        return _every(rank % size, self.job.hosts, size)


def starting(situation: Situation, standby: Sequence[str] = ()) -> ClusterView:
    """The snapshot before a run of the job: all workers start. ``standby``: hosts that wait."""
    hosts = (
        _host(situation, host, machine, _status(situation, machine.worker, Activity.STARTING))
        for host, machine in situation.machines.items()
    )
    hosts = (structs.replace(h, standby=h.host in standby) for h in hosts)
    return ClusterView(hosts=tuple(hosts), breaker=situation.breaker)


def view(situation: Situation, *, switched: bool = False) -> ClusterView:
    """The snapshot of a run. ``switched``: the vote has just switched to the planned joiners."""
    assert situation.record is not None
    if situation.halted is None:
        known = _training(situation, switched)
    else:
        known = _halted(situation, situation.record, situation.halted)
    hosts = (
        _host(situation, host, machine, known.get(machine.worker) or _standby(situation, host))
        for host, machine in situation.machines.items()
    )
    return ClusterView(
        hosts=tuple(hosts),
        jobs=(situation.record,),
        drains=tuple(situation.drains.values()),
        breaker=situation.breaker,
    )


def shadow_of(situation: Situation, host: str) -> ShadowStatus | None:
    """The progress of the shadow on ``host``, if it follows a rank."""
    machine, record = situation.machines.get(host), situation.record
    for assignment in record.shadows if record is not None else ():
        if machine is not None and assignment.member.worker == machine.worker:
            in_step = situation.now >= machine.follows_from
            return ShadowStatus(assignment.rank, verified=situation.reached if in_step else None)
    return None


def _host(situation: Situation, host: str, machine: Machine, status: WorkerStatus) -> HostStatus:
    return HostStatus(
        host,
        "simulated",
        workers=(status,) if machine.worker else (),
        exits=machine.ended,
        alerts=machine.alerts,
        at=situation.now,
    )


def _halted(situation: Situation, record: JobRecord, step: int) -> dict[str, WorkerStatus]:
    """Survivors name the workers to which their links broke. In phase SYNC every ready member
    reports SYNCED."""
    plan, members = situation.plan, record.membership.members
    up = {m.worker: m for m in situation.machines.values() if m.worker}
    joiners = [m.joiner for m in plan.moves if m.joiner] if plan is not None else []
    gone = tuple(m.worker for m in (*members, *joiners) if m.worker not in up)
    found = {
        member.worker: _status(
            situation,
            member.worker,
            Activity.STUCK,
            rank=rank,
            epoch=record.membership.epoch,
            step=step,
            suspects=gone,
            plan=plan.id if plan is not None else "",
            replicas=situation.replicas(rank),
            kept=_kept(situation, rank),
        )
        for rank, member in enumerate(members)
    }
    if plan is None or plan.phase is not Phase.SYNC:
        return found
    for rank, member in enumerate(plan.new.members):
        if member.worker in up and up[member.worker].ready:
            found[member.worker] = _status(
                situation,
                member.worker,
                Activity.SYNCED,
                rank=rank,
                epoch=plan.new.epoch,
                step=plan.resume or 0,
                plan=plan.id,
                replicas=situation.replicas(rank),
            )
    return found


def _training(situation: Situation, switched: bool) -> dict[str, WorkerStatus]:
    """Ranks train, while joiners of a planned move prepare."""
    record, plan = situation.record, situation.plan
    assert record is not None
    switches = plan is not None and (switched or plan.phase is Phase.SWITCH)
    members = plan.new if plan is not None and switches else record.membership
    entered = situation.step if switched else situation.snapshot
    found = {
        member.worker: _status(
            situation,
            member.worker,
            Activity.TRAINING,
            rank=rank,
            epoch=members.epoch,
            step=situation.step,
            entered=entered,
            step_seconds=1.0,
            replicas=situation.replicas(rank),
            kept=_kept(situation, rank),
        )
        for rank, member in enumerate(members.members)
    }
    return found if plan is None else {**found, **_parties(situation, plan, switches)}


def _parties(situation: Situation, plan: MigrationPlan, switches: bool) -> dict[str, WorkerStatus]:
    """Joiners of a planned move before the switch, and leavers after it."""
    up = {m.worker: m for m in situation.machines.values() if m.worker}
    found = {}
    for move in plan.moves:
        joiner = move.joiner
        if joiner is None or plan.kind is not PlanKind.PLANNED:
            continue
        if switches:
            left = {"epoch": plan.new.epoch, "step": situation.step, "plan": plan.id}
            found[move.leaver.worker] = _status(
                situation, move.leaver.worker, Activity.LEFT, **left
            )
        elif joiner.worker in up:
            ready = up[joiner.worker].ready
            found[joiner.worker] = _status(
                situation,
                joiner.worker,
                Activity.IN_STEP if ready else Activity.SHADOWING,
                step=situation.step,
                plan=plan.id,
                shadow=ShadowStatus(move.rank, verified=situation.step if ready else None),
            )
    return found


def _standby(situation: Situation, host: str) -> WorkerStatus:
    shadow, worker = shadow_of(situation, host), situation.machines[host].worker
    activity = Activity.STANDBY
    if shadow is not None and situation.halted is None:
        activity = Activity.SHADOWING if shadow.verified is None else Activity.IN_STEP
    return _status(situation, worker, activity, step=situation.reached, shadow=shadow)


def _status(
    situation: Situation, worker: str, activity: Activity, **changes: object
) -> WorkerStatus:
    plain = WorkerStatus(
        worker=worker,
        job=JOB,
        world_size=situation.job.hosts,
        address=f"{worker.partition('/')[0]}:1",
        pid=1,
        activity=activity,
    )
    return structs.replace(plain, **changes) if changes else plain


def _kept(situation: Situation, rank: int) -> tuple[Kept, ...]:
    """The copy of its own state, and the second copy that it keeps of the previous rank's."""
    every, step = situation.snapshot_steps, situation.reached
    if not every:
        return ()
    # A loss may halt the job at a step before the one that was recorded at the switch.
    newest = max(step - step % every, min(situation.snapshot, step))
    return (Kept(rank, newest), Kept((rank - 1) % situation.job.hosts, newest))


@lru_cache(maxsize=4096)
def _every(first: int, stop: int, step: int) -> tuple[int, ...]:
    """One shared tuple for all ranks with the same replicas: a view of a thousand hosts has a
    thousand of them."""
    return tuple(range(first, stop, step))

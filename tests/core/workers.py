"""The model of one trainer process, and how it lives the life of another."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from tmd.core.planning.directives import Arm, HoldState, Prepare, ShadowRank
from tmd.core.values.model import Activity, ShadowStatus, WorkerStatus
from tmd.core.values.snapshots import Kept

JOB = "sim"
LIVING = (Activity.SHADOWING, Activity.IN_STEP)


@dataclass
class Life:
    """``state`` is that of the rank after the last commit that was mirrored."""

    duty: Prepare | ShadowRank
    state: tuple[int, ...] | None = None
    won: bool = False
    """The vote that was mirrored last has given the rank to this worker."""
    lost: bool = False
    """Nothing more is mirrored."""

    def mirrored(self, state: tuple[int, ...], switched_to: int) -> None:
        """The rank has committed a step, and its vote agreed on an epoch (0: on none)."""
        if not self.lost:
            self.state = state
            duty = self.duty
            self.won = isinstance(duty, Prepare) and duty.membership.epoch == switched_to


@dataclass
class Worker:
    """The model of one trainer process."""

    name: str
    host: str
    size: int
    alike: tuple[int, ...] = ()
    """Ranks that are replicas of each other; empty if each state exists once."""
    alive: bool = True
    poisoned: bool = False
    state: tuple[int, ...] | None = None
    arm: Arm | None = None
    switch: Arm | None = None
    life: Life | None = None
    copies: dict[Kept, tuple[int, ...]] = field(default_factory=dict)
    """States to which ranks can go back."""
    status: WorkerStatus = field(init=False)

    def __post_init__(self) -> None:
        self.status = WorkerStatus(
            worker=self.name,
            job=JOB,
            world_size=self.size,
            address=f"{self.host}:1",
            pid=1,
            activity=Activity.STARTING,
        )

    def keep(self, copies: dict[Kept, tuple[int, ...]]) -> None:
        """Have these copies and no others."""
        self.copies = dict(copies)
        self.say(kept=tuple(sorted(self.copies)))

    def only(self, step: int | None) -> None:
        """No copy of another step is needed any more."""
        if step is not None:
            self.keep({k: v for k, v in self.copies.items() if k.step == step})

    def say(self, **changes: object) -> None:
        self.status = structs.replace(self.status, **changes)
        rank = self.status.rank
        alike = self.alike if rank is None or self.alike else (rank,)
        self.status = structs.replace(self.status, replicas=alike if rank is not None else ())


def live(worker: Worker, order: Prepare) -> None:
    """Follow the rank; once in step be ready; without a rank to follow fall back to a copy."""
    life = worker.life
    if worker.status.activity not in (Activity.STANDBY, *LIVING):
        return
    if life is None or life.duty != order:
        worker.life = Life(order)
        worker.say(activity=Activity.SHADOWING, plan=order.plan, rank=None, shadow=None)
    elif life.lost:
        worker.life = None
        worker.say(activity=Activity.PREPARED, plan=order.plan)
    elif life.state is not None:
        worker.say(activity=Activity.IN_STEP, plan=order.plan)


def study(worker: Worker, order: ShadowRank | HoldState) -> None:
    """Follow a rank without a plan; in a recovery keep what there is."""
    life = worker.life
    if worker.status.activity not in (Activity.STANDBY, *LIVING):
        return
    if isinstance(order, ShadowRank) and (life is None or life.duty != order):
        worker.life = Life(order)
        worker.say(activity=Activity.SHADOWING, plan="", shadow=ShadowStatus(order.rank))
    elif life is not None and life.state is not None:
        shadow = ShadowStatus(life.duty.rank, verified=len(life.state))
        # Who cannot be called again leaves what is here: a recovery may come that can use it.
        kept = isinstance(order, HoldState) or life.lost
        doing = Activity.STANDBY if kept else Activity.IN_STEP
        worker.say(activity=doing, plan="", shadow=shadow, step=len(life.state))
    else:
        worker.say(activity=Activity.STANDBY, plan="", shadow=None)


def take_over(worker: Worker, life: Life) -> Prepare:
    """The vote has given the rank to ``worker``, and it has the state."""
    duty, worker.life, worker.state = life.duty, None, life.state
    assert isinstance(duty, Prepare)
    assert worker.state is not None
    worker.say(
        activity=Activity.TRAINING,
        rank=duty.rank,
        epoch=duty.membership.epoch,
        step=len(worker.state),
        armed=0,
    )
    return duty

"""One trainer process without IO: the product's state machine, and a model of the state."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from tmd.core.planning.directives import Arm, Directive, Prepare, ShadowRank
from tmd.core.values.model import Activity, ShadowStatus, WorkerStatus
from tmd.core.values.snapshots import Kept
from tmd.core.worker.responses import Response, respond
from tmd.core.worker.transitions import WorkerTransition, transition

JOB = "sim"
SHADOWS = (Activity.SHADOWING, Activity.IN_STEP)


@dataclass
class Life:
    """``state`` is that of the rank after the last mirrored commit."""

    directive: Prepare | ShadowRank
    state: tuple[int, ...] | None = None
    won: bool = False
    """Whether the last mirrored vote has given the rank to this worker."""
    lost: bool = False
    """Whether mirroring has ended."""

    def mirrored(self, state: tuple[int, ...], switched_to: int) -> None:
        """The rank has committed a step, and its vote agreed on an epoch (0: on none)."""
        if not self.lost:
            self.state = state
            directive = self.directive
            self.won = isinstance(directive, Prepare) and directive.membership.epoch == switched_to

    def report(self) -> dict[str, object]:
        """The shadow's part of the status."""
        if self.state is None or isinstance(self.directive, Prepare):
            return {}
        shadow = ShadowStatus(self.directive.rank, verified=len(self.state))
        return {"shadow": shadow, "step": len(self.state)}


@dataclass
class Worker:
    """One trainer process. The product decides its response to a directive."""

    name: str
    host: str
    size: int
    alike: tuple[int, ...] = ()
    """Ranks that are replicas of each other; empty if each state is unique."""
    alive: bool = True
    poisoned: bool = False
    state: tuple[int, ...] | None = None
    arm: Arm | None = None
    switch: Arm | None = None
    life: Life | None = None
    under: Directive | None = None
    """The directive that led to its current activity."""
    held: tuple[int, ...] = ()
    """The ranks for which it computes its steps."""
    copies: dict[Kept, tuple[int, ...]] = field(default_factory=dict)
    """States that ranks can return to."""
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
        """Store these copies and no others."""
        self.copies = dict(copies)
        self.say(kept=tuple(sorted(self.copies)))

    def only(self, step: int | None) -> None:
        """Drop copies of other steps."""
        if step is not None:
            self.keep({k: v for k, v in self.copies.items() if k.step == step})

    def say(self, event: WorkerTransition | None = None, **changes: object) -> None:
        """Report ``changes``; ``event`` moves the worker by the product's table.

        Raises:
            IllegalTransition: the event is impossible in the worker's activity.
        """
        if event is not None:
            changes["activity"] = transition(self.status.activity, event)
        before, self.status = self.status, structs.replace(self.status, **changes)
        if self.status.epoch != before.epoch:
            self.status = structs.replace(self.status, entered=self.status.step)
        rank = self.status.rank
        alike = self.alike if rank is None or self.alike else (rank,)
        self.status = structs.replace(self.status, replicas=alike if rank is not None else ())

    def respond(self, directive: Directive) -> Response | None:
        """The response of the product's table to ``directive``."""
        done = self.life is not None and self.life.directive == directive
        if self.status.activity is Activity.STANDBY and isinstance(directive, ShadowRank) and done:
            return None
        return respond(directive, self.status, under=self.under, has_shadow=self.life is not None)

    def stand_by(self) -> None:
        """Give up rank and state."""
        self.state = self.life = self.under = None
        self.say(WorkerTransition.STOOD_BY, plan="", rank=None, armed=0, shadow=None)

    def shadow(self, directive: Prepare | ShadowRank) -> None:
        """Begin to shadow the rank of ``directive``."""
        self.life = Life(directive)
        self.under = directive
        plan = directive.plan if isinstance(directive, Prepare) else ""
        shadow = ShadowStatus(directive.rank) if isinstance(directive, ShadowRank) else None
        self.say(WorkerTransition.SHADOWED, plan=plan, rank=None, shadow=shadow)

    def stop_shadowing(self) -> None:
        """Another directive came: only a hot standby keeps the state."""
        life, self.under = self.life, None
        stays = life is not None and isinstance(life.directive, ShadowRank)
        if life is not None and stays and life.state is not None:
            self.say(WorkerTransition.LEFT_ALONE, plan="", **life.report())
        else:
            self.stand_by()

    def go_on_shadowing(self) -> None:
        """Another boundary under the same directive."""
        life = self.life
        assert life is not None
        if life.lost and isinstance(life.directive, Prepare):
            self.life = None
            # Nobody hands over an adopted rank.
            refuses = life.directive.adopted
            event = WorkerTransition.REFUSED if refuses else WorkerTransition.PREPARED
            self.say(event, plan=life.directive.plan)
        elif life.lost:
            self.stop_shadowing()
            # It has tried this directive.
            self.life = life
        elif life.state is not None:
            late = self.status.activity is Activity.SHADOWING
            self.say(WorkerTransition.CAUGHT_UP if late else None, **life.report())

    def take_over(self) -> Prepare:
        """The vote has given the rank to this worker, and it has the state."""
        life, self.life, self.under = self.life, None, None
        assert life is not None
        assert isinstance(life.directive, Prepare)
        assert life.state is not None
        self.state = life.state
        self.held = life.directive.membership.held_by(self.name)
        self.say(
            WorkerTransition.TOOK_OVER,
            rank=life.directive.rank,
            epoch=life.directive.membership.epoch,
            step=len(life.state),
            armed=0,
        )
        return life.directive

"""The values that the parts of the simulation exchange.

Times are virtual: in seconds where the name ends in ``_s``, else in hours.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from tmd.core.planning.goodput import LossCause

HOUR = 3600.0


class FaultScope(StrEnum):
    """What a fault takes away."""

    HOST = "host"  # until it is repaired
    WORKER = "worker"  # its host stays: the launcher starts another worker
    JOB = "job"  # all workers of the job end, as after a bug in the script


class Warned(StrEnum):
    """How a fault of a host is known before."""

    NOT = "not"
    DRAIN = "drain"  # an operator asks for the host
    FINDING = "finding"  # a detector finds that the host degrades


class Fault(Struct, frozen=True):
    """One fault. Faults strike places, so that all setups meet the same ones."""

    at_s: float
    place: int
    """Below the number of hosts in the job: the host that holds this rank at that time. Otherwise
    a standby; the first one has the number of hosts as its place."""
    component: str
    scope: FaultScope = FaultScope.HOST
    repair_s: float = 0.0
    """Time until the host is back; of a worker: see ``Costs.rejoin_s``."""
    warned: Warned = Warned.NOT
    notice_s: float = 0.0
    """Time from the warning to the fault."""


class Cause(StrEnum):
    """Why time is lost. The causes of :class:`LossCause` mean what the leader means by them."""

    PLANNED_MOVE = LossCause.PLANNED_MOVE.value
    INTERRUPTED_STEP = LossCause.INTERRUPTED_STEP.value
    FAILOVER = LossCause.FAILOVER.value
    HOLD = LossCause.HOLD.value
    REPEATED_STEPS = LossCause.REPEATED_STEPS.value
    RESTART = "restart"  # all workers start again and load a checkpoint
    RESIZE = "resize"  # an elastic job changes its number of replicas
    SHRUNK = "shrunk"  # replicas that an elastic job lacks
    CHECKPOINT = "checkpoint"  # training waits for a checkpoint
    SNAPSHOT = "snapshot"  # training waits for a snapshot
    SHADOW = "shadow"  # training is slower, since hot standbys are fed


class RecoveryMethod(StrEnum):
    """How a job goes on after a loss."""

    RESTART = "restart"
    ELASTIC = "elastic"
    WARM = "warm"
    HOT = "hot"


class RecoverySetup(Struct, frozen=True):
    """What is compared: a method and a number of standbys."""

    method: RecoveryMethod
    standbys: int

    @property
    def name(self) -> str:
        """The method and the number of standbys, as shown in tables."""
        return f"{self.method}, {self.standbys}"


class Job(Struct, frozen=True):
    """The job that is simulated."""

    hosts: int
    """Hosts that train; each holds one rank of the simulated job, see the documentation."""
    replica_hosts: int = 1
    """Hosts of one model replica. With all hosts in one replica each state exists once."""
    hours: float = 720.0

    @property
    def whole_s(self) -> float:
        return self.hours * HOUR

    @property
    def replicas(self) -> int:
        return self.hosts // self.replica_hosts

    @property
    def state_exists_once(self) -> bool:
        """Whether the state of a rank exists once."""
        return self.replicas == 1


class WorkDone(NamedTuple):
    """Progress of the job, in seconds of undisturbed training."""

    steps: int
    """Completed steps."""
    in_step_s: float
    """Work on the step under way."""
    unsaved_s: float
    """Work since the start of the latest complete checkpoint."""


class LostWork(NamedTuple):
    """Work that is lost at once and done again."""

    cause: Cause
    seconds: float


def unsaved(work: WorkDone) -> tuple[LostWork, ...]:
    """All that is lost if the job goes on from its latest checkpoint."""
    return (LostWork(Cause.REPEATED_STEPS, work.unsaved_s),)


class NextPhase(NamedTuple):
    """What a job does from now on, after an event."""

    lasts_s: float = math.inf
    """Time after which the method decides again."""
    cause: Cause | None = None
    """The cause for which the time of the new phase counts as lost; ``None``: the job trains."""
    losses: tuple[LostWork, ...] = ()
    speed: float = 1.0
    """Share of the replicas that train."""
    from_checkpoint: bool = False
    """Whether the job goes on from a checkpoint."""


TRAINING = NextPhase()
"""The job trains until something happens."""


def holding(losses: tuple[LostWork, ...]) -> NextPhase:
    """The job waits for a host, and goes on from a checkpoint then."""
    return NextPhase(cause=Cause.HOLD, losses=losses, from_checkpoint=True)


def restarting(
    seconds: float, losses: tuple[LostWork, ...], cause: Cause = Cause.RESTART
) -> NextPhase:
    """The job starts from a checkpoint, which takes ``seconds``."""
    return NextPhase(seconds, cause, losses, from_checkpoint=True)


class Outcome(Struct, frozen=True):
    """The result of one setup on one trace, or the mean over several, in hours of the job."""

    setup: RecoverySetup
    hours: float
    useful: float
    lost: dict[str, float]
    """Hours by cause; with ``useful`` they sum up to ``hours``."""
    faults: float
    """Faults that struck a host of the job or a standby, or the job."""
    counts: dict[str, float]
    """How often training stopped, by the reason."""
    checkpoint_s: float
    """Time between two checkpoints; 0 for none."""

    @property
    def goodput(self) -> float:
        """Useful time as a share of the whole."""
        return self.useful / self.hours

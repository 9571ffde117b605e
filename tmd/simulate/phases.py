"""What a simulated job does, as a table: phases, events, and the legal transitions."""

from __future__ import annotations

from enum import StrEnum

from tmd.core.values.tables import next_state


class JobPhase(StrEnum):
    """What the job does."""

    TRAINING = "training"
    STANDING = "standing"  # a failover, a restart, a move or a change of size is under way
    HOLDING = "holding"  # waits for a host


class PhaseEvent(StrEnum):
    """What a setup makes of a change."""

    STANDS = "stands"
    HOLDS = "holds"
    TRAINS = "trains"


TABLE: dict[JobPhase, dict[PhaseEvent, JobPhase]] = {
    JobPhase.TRAINING: {
        PhaseEvent.TRAINS: JobPhase.TRAINING,
        PhaseEvent.STANDS: JobPhase.STANDING,
        PhaseEvent.HOLDS: JobPhase.HOLDING,
    },
    JobPhase.STANDING: {
        PhaseEvent.TRAINS: JobPhase.TRAINING,
        PhaseEvent.STANDS: JobPhase.STANDING,
        PhaseEvent.HOLDS: JobPhase.HOLDING,
    },
    # A host that comes has to be taken in before training goes on.
    JobPhase.HOLDING: {PhaseEvent.STANDS: JobPhase.STANDING, PhaseEvent.HOLDS: JobPhase.HOLDING},
}


def after(phase: JobPhase, event: PhaseEvent) -> JobPhase:
    """The phase after ``event``.

    Raises:
        IllegalTransition: the table has no such event.
    """
    return next_state(TABLE, phase, event, f"'{event}' cannot happen while {phase}")

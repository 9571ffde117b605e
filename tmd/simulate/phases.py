"""What a simulated job does, as a table: phases, events, and the legal transitions."""

from __future__ import annotations

from enum import StrEnum

from tmd.core.values.tables import next_state


class Phase(StrEnum):
    """What the job does."""

    TRAINING = "training"
    STANDING = "standing"  # a failover, a restart, a move or a change of size is under way
    HOLDING = "holding"  # waits for a host


class Event(StrEnum):
    """What a way makes of a change."""

    STANDS = "stands"
    HOLDS = "holds"
    TRAINS = "trains"


TABLE: dict[Phase, dict[Event, Phase]] = {
    Phase.TRAINING: {
        Event.TRAINS: Phase.TRAINING,
        Event.STANDS: Phase.STANDING,
        Event.HOLDS: Phase.HOLDING,
    },
    Phase.STANDING: {
        Event.TRAINS: Phase.TRAINING,
        Event.STANDS: Phase.STANDING,
        Event.HOLDS: Phase.HOLDING,
    },
    # A host that comes has to be taken in before training goes on.
    Phase.HOLDING: {Event.STANDS: Phase.STANDING, Event.HOLDS: Phase.HOLDING},
}


def after(phase: Phase, event: Event) -> Phase:
    """The phase after ``event``.

    Raises:
        IllegalTransition: the table has no such event.
    """
    return next_state(TABLE, phase, event, f"'{event}' cannot happen while {phase}")

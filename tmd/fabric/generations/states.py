"""The states of one generation of one group: one table.

Every legal transition is in ``TABLE``. An event that the table does not allow raises and changes
nothing.
"""

from __future__ import annotations

from enum import StrEnum

from tmd.core.values.tables import next_state


class GenerationState(StrEnum):
    BUILDING = "building"
    READY = "ready"
    """Built, and not used yet."""
    LIVE = "live"
    RETIRED = "retired"
    """Replaced by a later one; its members may still use it."""
    DISCARDED = "discarded"
    ABORTED = "aborted"
    FREED = "freed"


class GenerationEvent(StrEnum):
    BUILT = "built"
    DROPPED = "dropped, or its build failed"
    SWITCHED_TO = "switched to"
    REPLACED = "replaced"
    LOST = "lost a member"
    CLOSED = "closed"


_OVER = {GenerationEvent.CLOSED: GenerationState.FREED}
TABLE: dict[GenerationState, dict[GenerationEvent, GenerationState]] = {
    GenerationState.BUILDING: {
        GenerationEvent.BUILT: GenerationState.READY,
        GenerationEvent.DROPPED: GenerationState.DISCARDED,
    },
    GenerationState.READY: {
        GenerationEvent.SWITCHED_TO: GenerationState.LIVE,
        GenerationEvent.DROPPED: GenerationState.DISCARDED,
    },
    GenerationState.LIVE: {
        GenerationEvent.REPLACED: GenerationState.RETIRED,
        GenerationEvent.LOST: GenerationState.ABORTED,
    },
    # A collective that was called before the switch may still run in it.
    GenerationState.RETIRED: {**_OVER, GenerationEvent.LOST: GenerationState.ABORTED},
    GenerationState.DISCARDED: _OVER,
    GenerationState.ABORTED: _OVER,
    GenerationState.FREED: {},
}


def transition(state: GenerationState, event: GenerationEvent) -> GenerationState:
    """The state after ``event``.

    Raises:
        IllegalTransition: the table has no such event for ``state``.
    """
    refusal = f"'{event}' cannot happen to a generation that is {state}"
    return next_state(TABLE, state, event, refusal)

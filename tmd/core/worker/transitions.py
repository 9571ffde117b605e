"""The states of a worker: one table.

Every legal transition is in ``TABLE``. An event that the table does not allow raises and changes
nothing. docs/how/machines.md shows a diagram that is generated from it.
"""

from __future__ import annotations

from enum import StrEnum

from tmd.core.values.model import Activity
from tmd.core.values.tables import next_state


class WorkerTransition(StrEnum):
    """Events of a worker."""

    ENTERED = "entered an epoch as a rank"
    STOOD_BY = "gave up rank and identity"
    SHADOWED = "began to shadow a rank"
    CAUGHT_UP = "computes in step with the rank"
    FELL_BEHIND = "computes too late"
    LEFT_ALONE = "lost the rank it shadowed, kept its state"
    PREPARED = "opened the links, expects a copy of the state"
    REFUSED = "cannot do what the plan asks"
    TOOK_OVER = "took the rank over"
    GAVE_AWAY = "gave its rank to the joiner"
    HALTED = "the step broke, or the plan is reopened"
    SYNCED = "ready for the resume step"
    JOB_ENDED = "a rank came to the end of training"


_JOINER = {
    WorkerTransition.STOOD_BY: Activity.STANDBY,
    WorkerTransition.REFUSED: Activity.REFUSED,
    WorkerTransition.TOOK_OVER: Activity.TRAINING,
}
_SHADOW = {
    **_JOINER,
    WorkerTransition.SHADOWED: Activity.SHADOWING,
    WorkerTransition.LEFT_ALONE: Activity.STANDBY,
    WorkerTransition.PREPARED: Activity.PREPARED,
}

TABLE: dict[Activity, dict[WorkerTransition, Activity]] = {
    Activity.STARTING: {
        WorkerTransition.ENTERED: Activity.TRAINING,
        WorkerTransition.STOOD_BY: Activity.STANDBY,
    },
    Activity.STANDBY: {
        WorkerTransition.STOOD_BY: Activity.STANDBY,
        WorkerTransition.SHADOWED: Activity.SHADOWING,
        WorkerTransition.PREPARED: Activity.PREPARED,
        WorkerTransition.REFUSED: Activity.REFUSED,
        WorkerTransition.SYNCED: Activity.SYNCED,
    },
    Activity.SHADOWING: {**_SHADOW, WorkerTransition.CAUGHT_UP: Activity.IN_STEP},
    Activity.IN_STEP: {**_SHADOW, WorkerTransition.FELL_BEHIND: Activity.SHADOWING},
    Activity.PREPARED: _JOINER,
    Activity.REFUSED: {WorkerTransition.STOOD_BY: Activity.STANDBY},
    Activity.TRAINING: {
        WorkerTransition.HALTED: Activity.STUCK,
        WorkerTransition.GAVE_AWAY: Activity.LEFT,
        # Its state was held on trust, and the verification failed.
        WorkerTransition.STOOD_BY: Activity.STANDBY,
    },
    Activity.STUCK: {
        WorkerTransition.SYNCED: Activity.SYNCED,
        WorkerTransition.STOOD_BY: Activity.STANDBY,
        WorkerTransition.JOB_ENDED: Activity.TRAINING,
    },
    Activity.SYNCED: {
        WorkerTransition.ENTERED: Activity.TRAINING,
        WorkerTransition.HALTED: Activity.STUCK,
        WorkerTransition.STOOD_BY: Activity.STANDBY,
    },
    # It keeps the state until the joiner has committed, or takes the rank back.
    Activity.LEFT: {
        WorkerTransition.HALTED: Activity.STUCK,
        WorkerTransition.STOOD_BY: Activity.STANDBY,
    },
}


def transition(activity: Activity, event: WorkerTransition) -> Activity:
    """The activity after ``event``.

    Raises:
        IllegalTransition: the table has no such event for ``activity``.
    """
    refusal = f"'{event}' cannot happen to a worker that is {activity}"
    return next_state(TABLE, activity, event, refusal)

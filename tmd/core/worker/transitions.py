"""The states of a worker: one table.

Every legal transition stands in ``TABLE`` and nowhere else. An event that the table does not allow
raises and changes nothing. docs/how/machines.md shows a diagram that is generated from it.
"""

from __future__ import annotations

from enum import StrEnum

from tmd.core.values.errors import IllegalTransition
from tmd.core.values.model import Activity


class WorkerEvent(StrEnum):
    """What can happen to a worker."""

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
    WorkerEvent.STOOD_BY: Activity.STANDBY,
    WorkerEvent.REFUSED: Activity.REFUSED,
    WorkerEvent.TOOK_OVER: Activity.TRAINING,
}
_SHADOW = {
    **_JOINER,
    WorkerEvent.SHADOWED: Activity.SHADOWING,
    WorkerEvent.LEFT_ALONE: Activity.STANDBY,
    WorkerEvent.PREPARED: Activity.PREPARED,
}

TABLE: dict[Activity, dict[WorkerEvent, Activity]] = {
    Activity.STARTING: {
        WorkerEvent.ENTERED: Activity.TRAINING,
        WorkerEvent.STOOD_BY: Activity.STANDBY,
    },
    Activity.STANDBY: {
        WorkerEvent.STOOD_BY: Activity.STANDBY,
        WorkerEvent.SHADOWED: Activity.SHADOWING,
        WorkerEvent.PREPARED: Activity.PREPARED,
        WorkerEvent.REFUSED: Activity.REFUSED,
        WorkerEvent.SYNCED: Activity.SYNCED,
    },
    Activity.SHADOWING: {**_SHADOW, WorkerEvent.CAUGHT_UP: Activity.IN_STEP},
    Activity.IN_STEP: {**_SHADOW, WorkerEvent.FELL_BEHIND: Activity.SHADOWING},
    Activity.PREPARED: _JOINER,
    Activity.REFUSED: {WorkerEvent.STOOD_BY: Activity.STANDBY},
    Activity.TRAINING: {
        WorkerEvent.HALTED: Activity.STUCK,
        WorkerEvent.GAVE_AWAY: Activity.LEFT,
        # Its state was taken on trust, and the verification refuted it.
        WorkerEvent.STOOD_BY: Activity.STANDBY,
    },
    Activity.STUCK: {
        WorkerEvent.SYNCED: Activity.SYNCED,
        WorkerEvent.STOOD_BY: Activity.STANDBY,
        WorkerEvent.JOB_ENDED: Activity.TRAINING,
    },
    Activity.SYNCED: {
        WorkerEvent.ENTERED: Activity.TRAINING,
        WorkerEvent.HALTED: Activity.STUCK,
        WorkerEvent.STOOD_BY: Activity.STANDBY,
    },
    # It keeps the state until the joiner has committed, or takes the rank back.
    Activity.LEFT: {
        WorkerEvent.HALTED: Activity.STUCK,
        WorkerEvent.STOOD_BY: Activity.STANDBY,
    },
}


def transition(activity: Activity, event: WorkerEvent) -> Activity:
    """The activity after ``event``.

    Raises:
        IllegalTransition: the table has no such event for ``activity``.
    """
    after = TABLE[activity].get(event)
    if after is None:
        raise IllegalTransition(f"'{event}' cannot happen to a worker that is {activity}")
    return after

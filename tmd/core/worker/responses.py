"""The response of a worker to a directive, by its activity: one table.

A directive states the complete situation and repeats until it changes, so a worker may ignore one
that has no use in its activity. ``TABLE`` lists those that it acts on; :func:`respond` adds the
conditions that depend on epoch, plan and worker.

A worker that waits calls :func:`respond`. A worker that computes cannot wait: for TRAINING and the
three joining activities the agent's thread acts at once, in ``Arming.obey``, ``Coordinator.obey``
and ``ShadowDriver.cancel_unless``; a ``Hold`` is looked at again before each step. Of those
rows a worker reads only ``Arm`` under TRAINING, and the simulation the rest.
"""

from __future__ import annotations

from enum import StrEnum
from typing import get_args

from tmd.core.planning.directives import (
    Arm,
    Directive,
    EndOf,
    Finish,
    Hold,
    HoldState,
    Leave,
    Prepare,
    Resume,
    ShadowRank,
    Sync,
    Train,
    Wait,
)
from tmd.core.values.model import Activity, WorkerStatus


class Response(StrEnum):
    """The worker's action; the packages of the trainer carry it out."""

    ENTER = "enter the epoch as the rank"
    WARM_UP = "run shadow iterations with neutral groups"
    STAND_BY = "give up rank and identity"
    SHADOW = "shadow the rank"
    PREPARE = "open the links and prepare to be the rank"
    REPLACE = "receive the state of a lost rank"
    CANCEL = "break off what belongs to an earlier directive"
    ARM = "switch epochs at the next vote that agrees"
    DISARM = "switch epochs no more"
    ACKNOWLEDGE = "report to this plan that the worker has halted"
    HALT = "give up the present step"
    SYNC = "be ready for the resume step"
    FINISH = "apply what is whole and run to the end"
    EXIT = "end the process"
    ABANDON = "end with an error: a rank was lost before the first step"


_ANY: tuple[type[Directive], ...] = get_args(Directive)
_JOINING = dict.fromkeys(_ANY, Response.CANCEL)

TABLE: dict[Activity, dict[type[Directive], Response]] = {
    Activity.STARTING: {
        Train: Response.ENTER,
        Wait: Response.WARM_UP,
        Leave: Response.EXIT,
        # It was given a rank, but a loss replaced its Train before that arrived. There is nothing
        # to recover before the first step.
        Hold: Response.ABANDON,
        Sync: Response.ABANDON,
        Resume: Response.ABANDON,
        Finish: Response.EXIT,
    },
    Activity.STANDBY: {
        Wait: Response.STAND_BY,
        ShadowRank: Response.SHADOW,
        Prepare: Response.PREPARE,
        Sync: Response.REPLACE,
        Finish: Response.EXIT,
        Leave: Response.EXIT,
    },
    Activity.SHADOWING: _JOINING,
    Activity.IN_STEP: _JOINING,
    Activity.PREPARED: _JOINING,
    Activity.REFUSED: dict.fromkeys(_ANY, Response.STAND_BY),
    Activity.TRAINING: {
        Arm: Response.ARM,
        Train: Response.DISARM,
        Wait: Response.DISARM,
        Hold: Response.HALT,
    },
    Activity.STUCK: {
        Hold: Response.ACKNOWLEDGE,
        Sync: Response.SYNC,
        Finish: Response.FINISH,
        Wait: Response.STAND_BY,
        Leave: Response.EXIT,
    },
    Activity.SYNCED: {
        Resume: Response.ENTER,
        Train: Response.ENTER,
        Hold: Response.HALT,
        Sync: Response.HALT,
        Wait: Response.STAND_BY,
        HoldState: Response.STAND_BY,
        Finish: Response.EXIT,
        Leave: Response.EXIT,
    },
    Activity.LEFT: {
        Hold: Response.HALT,
        Wait: Response.STAND_BY,
        Finish: Response.EXIT,
        Leave: Response.EXIT,
    },
}


def respond(
    directive: Directive,
    status: WorkerStatus,
    *,
    under: Directive | None = None,
    has_shadow: bool = False,
    one_run: bool = False,
) -> Response | None:
    """The response of a worker of ``status`` to ``directive``; ``None`` if it does nothing new.

    Args:
        directive: the latest one.
        status: the worker's own.
        under: the directive that led to the worker's current activity, if any.
        has_shadow: whether a standby still holds a shadowed state.
        one_run: whether the worker takes part in this run of the job only, as a restarted one does.
    """
    response = TABLE[status.activity].get(type(directive))
    match status.activity, directive:
        case Activity.STARTING, Leave():
            match directive.end_of or (EndOf.RUN if directive.code else EndOf.TRAINING):
                case EndOf.WORKER:
                    return response
                case EndOf.TRAINING:  # the next run may begin under the same name
                    return response if one_run else None
                case EndOf.RUN:
                    return None
        case Activity.STANDBY, Wait():
            return response if has_shadow else None
        case ((Activity.SHADOWING | Activity.IN_STEP | Activity.PREPARED), _):
            return response if directive != under else None
        case Activity.REFUSED, Prepare(plan=plan) | Sync(plan=plan):
            return response if plan != status.plan else None
        case Activity.TRAINING, Arm(membership=later):
            return response if later.epoch > status.epoch else None
        case Activity.TRAINING, Hold(epoch=epoch):
            return response if epoch <= status.epoch else None
        case Activity.STUCK, Hold(plan=plan):
            return response if plan != status.plan else None
        case Activity.SYNCED, Train(membership=later):
            return response if later.epoch > status.epoch else None
        case ((Activity.STUCK | Activity.SYNCED), Sync()):
            if status.activity is Activity.SYNCED and directive == under:
                return None
            return Response.STAND_BY if receives(directive, status.worker) else response
    return response


def receives(directive: Sync, worker: str) -> bool:
    """Whether a source sends the state to ``worker``, even if the worker has it already.

    True for a joiner that had the state when the leader, which did not know that yet, stored a plan
    that copies it again.
    """
    joiners = [move.joiner for move in directive.moves if move.source is not None]
    return any(joiner is not None and joiner.worker == worker for joiner in joiners)

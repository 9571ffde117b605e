"""The worker's two tables: legal transitions, and the response to each directive."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from msgspec import structs

from tests import values
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
    directive_of,
)
from tmd.core.values.errors import IllegalTransition
from tmd.core.values.model import Activity, JobState, Member, Membership, Move, WorkerStatus
from tmd.core.worker import responses, transitions
from tmd.core.worker.responses import Response, receives, respond
from tmd.core.worker.transitions import WorkerTransition, transition

A, B, C = (Member(f"w{i}", f"h{i}", f"h{i}:1") for i in range(3))
OLD, NEW = Membership(1, (A, B)), Membership(2, (A, C))
STATUS = WorkerStatus(A.worker, "j", 2, A.address, 1, Activity.TRAINING, rank=0, epoch=1, plan="p")
SYNC = Sync("p", NEW, 0, 7, (Move(1, B, C, source=A),))
DIRECTIVES: dict[type[Directive], Directive] = {
    Wait: Wait(),
    Train: Train(NEW, 0),
    Prepare: Prepare("q", NEW, 0, B, 1),
    ShadowRank: ShadowRank(0, 2, B, stay=True),
    HoldState: HoldState("p"),
    Arm: Arm("p", NEW, ()),
    Hold: Hold("q", 1),
    Sync: structs.replace(SYNC, plan="q"),
    Resume: Resume("p", NEW, 0),
    Finish: Finish(),
    Leave: Leave(),
}


def doing(activity: Activity) -> WorkerStatus:
    return structs.replace(STATUS, activity=activity)


def test_every_activity_and_every_directive_is_known() -> None:
    """A new one needs its row, or its column."""
    assert set(transitions.TABLE) == set(responses.TABLE) == set(Activity)
    assert set(DIRECTIVES) == set(get_args(Directive))


@pytest.mark.parametrize("activity", Activity)
@pytest.mark.parametrize("event", WorkerTransition)
def test_every_transition_that_the_table_lacks_is_refused(
    activity: Activity, event: WorkerTransition
) -> None:
    """Each cell of the table: the activity it names, or an error."""
    expected = transitions.TABLE[activity].get(event)
    if expected is not None:
        assert transition(activity, event) is expected
        return
    with pytest.raises(IllegalTransition, match=f"'{event}' cannot happen"):
        transition(activity, event)


def test_every_activity_but_the_first_can_be_reached_and_left() -> None:
    """No activity is a dead end, and only a new process is starting."""
    reached = {after for row in transitions.TABLE.values() for after in row.values()}

    assert reached == set(Activity) - {Activity.STARTING}
    assert all(set(row.values()) - {before} for before, row in transitions.TABLE.items())


def test_every_event_and_every_response_has_a_cell() -> None:
    """Every named event and response can happen."""
    assert {event for row in transitions.TABLE.values() for event in row} == set(WorkerTransition)
    assert {each for row in responses.TABLE.values() for each in row.values()} == set(Response)


@pytest.mark.parametrize("activity", Activity)
@pytest.mark.parametrize("kind", DIRECTIVES, ids=lambda kind: kind.__name__)
def test_a_directive_whose_conditions_hold_gets_the_response_of_the_table(
    activity: Activity, kind: type[Directive]
) -> None:
    """Each cell of the table."""
    response = respond(DIRECTIVES[kind], doing(activity), has_shadow=True, one_run=True)

    assert response is responses.TABLE[activity].get(kind)


@pytest.mark.parametrize(
    ("activity", "directive", "more"),
    [
        (Activity.STARTING, Leave(), {}),
        (Activity.STARTING, Leave(code=1, end_of=EndOf.RUN), {"one_run": True}),
        (Activity.STARTING, Leave(code=1, end_of=EndOf.TRAINING), {}),
        (Activity.STARTING, Leave(code=1, detail="lost"), {"one_run": True}),  # from 0.1.0
        (Activity.STANDBY, Wait(), {}),
        (Activity.SHADOWING, DIRECTIVES[Prepare], {"under": DIRECTIVES[Prepare]}),
        (Activity.IN_STEP, DIRECTIVES[ShadowRank], {"under": DIRECTIVES[ShadowRank]}),
        (Activity.PREPARED, DIRECTIVES[Prepare], {"under": DIRECTIVES[Prepare]}),
        (Activity.REFUSED, Prepare("p", NEW, 0, B, 1), {}),
        (Activity.REFUSED, SYNC, {}),
        (Activity.TRAINING, Arm("p", OLD, ()), {}),
        (Activity.TRAINING, Hold("p", 2), {}),
        (Activity.STUCK, Hold("p", 1), {}),
        (Activity.SYNCED, Train(OLD, 0), {}),
        (Activity.SYNCED, SYNC, {"under": SYNC}),
    ],
)
def test_a_repeated_directive_changes_nothing(
    activity: Activity, directive: Directive, more: dict[str, Any]
) -> None:
    """It names an older epoch or the current plan, or the worker already carries it out."""
    assert respond(directive, doing(activity), **more) is None


def test_a_worker_that_is_started_again_after_training_does_not_wait_for_another_run() -> None:
    """Not even if the job has failed: a rank failed while it saved its results."""
    record = structs.replace(
        values.record("n1"), state=JobState.FAILED, detail="lost", trained=True
    )
    found = directive_of(record, "n2/job/0.b")

    assert found == Leave(code=1, detail="lost", end_of=EndOf.TRAINING)
    assert respond(found, doing(Activity.STARTING), one_run=True) is Response.EXIT


@pytest.mark.parametrize("one_run", [False, True])
def test_a_worker_that_a_drain_dismisses_before_it_has_joined_leaves(one_run: bool) -> None:
    """The latest directive may be the first that it gets."""
    record = structs.replace(values.record("n1"), dismissed=("n2/job/0.a",))
    found = directive_of(record, "n2/job/0.a")

    assert respond(found, doing(Activity.STARTING), one_run=one_run) is Response.EXIT


@pytest.mark.parametrize("activity", [Activity.STUCK, Activity.SYNCED])
def test_a_worker_to_which_a_source_sends_the_state_stands_by_first(activity: Activity) -> None:
    """The plan was rewritten before the leader received the report that the worker is ready."""
    sync = structs.replace(SYNC, moves=(Move(0, B, A, source=C),))

    assert receives(sync, A.worker)
    assert not receives(sync, C.worker)
    assert respond(sync, doing(activity)) is Response.STAND_BY

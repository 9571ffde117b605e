"""The directive of each party of a plan, in each of its phases."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.core.test_migration import PLAN
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
from tmd.core.values.model import (
    JobRecord,
    JobState,
    Member,
    Membership,
    MigrationPlan,
    Move,
    Phase,
    PlanKind,
)
from tmd.core.values.shadows import ShadowAssignment
from tmd.core.values.snapshots import Rollback

STAYER, LEAVER, JOINER, OTHER = (Member(w, f"h-{w}", "a:1") for w in ("s", "l", "j", "o"))
OLD, NEW = Membership(1, (STAYER, LEAVER)), Membership(2, (STAYER, JOINER))
MOVES = (Move(1, LEAVER, JOINER, source=LEAVER),)
PLANNED = structs.replace(PLAN, moves=MOVES, old=OLD, new=NEW)
FAILOVER = structs.replace(
    PLANNED,
    kind=PlanKind.FAILOVER,
    moves=(Move(1, LEAVER, JOINER, source=STAYER),),
    dead=(LEAVER.worker,),
    witnesses=(STAYER, LEAVER),
    resume=7,
)
RECORD = JobRecord(job="j", world_size=2, state=JobState.RUNNING, membership=OLD, proposed=2)
FINISHED = Leave(end_of=EndOf.TRAINING)
FAILED = Leave(code=1, detail="lost", end_of=EndOf.RUN)
HOT = (ShadowAssignment(member=OTHER, rank=1, stay=True),)


def asked(plan: MigrationPlan | None, worker: Member, **record: object) -> Directive:
    """The directive of ``worker`` under ``plan``."""
    after = NEW if plan is not None and plan.phase in (Phase.SWITCH, Phase.RESUME) else OLD
    changed = {"plan": plan, "membership": after, **record}
    return directive_of(structs.replace(RECORD, **changed), worker.worker)


@pytest.mark.parametrize(
    ("phase", "stayer", "leaver", "joiner"),
    [
        (Phase.PREPARE, Train, Train, Prepare),
        (Phase.READY, Arm, Arm, Prepare),
        (Phase.SWITCH, Arm, Arm, Prepare),
        (Phase.DISARM, Train, Train, Wait),
        (Phase.ABORTED, Train, Train, Wait),
    ],
)
def test_in_a_planned_move(
    phase: Phase, stayer: type[Directive], leaver: type[Directive], joiner: type[Directive]
) -> None:
    """All members get the same directive; the joiner prepares until the plan is dropped."""
    plan = structs.replace(PLANNED, phase=phase)

    assert isinstance(asked(plan, STAYER), stayer)
    assert isinstance(asked(plan, LEAVER), leaver)
    assert isinstance(asked(plan, JOINER), joiner)


@pytest.mark.parametrize(
    ("phase", "survivor", "joiner"),
    [(Phase.RECOVER, Hold, Wait), (Phase.SYNC, Sync, Sync), (Phase.RESUME, Resume, Resume)],
)
def test_in_a_failover(phase: Phase, survivor: type[Directive], joiner: type[Directive]) -> None:
    """The dead worker's process must end, in every phase."""
    plan = structs.replace(FAILOVER, phase=phase)

    assert isinstance(asked(plan, STAYER), survivor)
    assert isinstance(asked(plan, JOINER), joiner)
    dead = Leave(code=1, detail="named dead by plan p: a test", end_of=EndOf.WORKER)
    assert asked(plan, LEAVER) == dead


def test_a_disarmed_member_reports_the_plan_that_was_dropped() -> None:
    """The leader waits for that before it calls the plan aborted."""
    found = asked(structs.replace(PLANNED, phase=Phase.DISARM), STAYER)

    assert isinstance(found, Train)
    assert found.dropped == PLANNED.id


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (None, ShadowRank),
        (Phase.RECOVER, HoldState),
        (Phase.SYNC, HoldState),
        (Phase.RESUME, ShadowRank),
    ],
)
def test_a_hot_standby_holds_its_state_while_a_recovery_may_need_it(
    phase: Phase | None, expected: type[Directive]
) -> None:
    plan = None if phase is None else structs.replace(FAILOVER, phase=phase)

    assert isinstance(asked(plan, OTHER, shadows=HOT), expected)


def test_a_leaver_that_was_drained_for_good_leaves() -> None:
    """Otherwise it becomes a standby."""
    done = structs.replace(PLANNED, phase=Phase.DONE)
    for_good = structs.replace(done, leave=True)

    assert asked(None, LEAVER, membership=NEW, history=(done,)) == Wait()
    found = asked(None, LEAVER, membership=NEW, history=(for_good,))
    assert found == Leave(detail="drained by plan p", end_of=EndOf.WORKER)


@pytest.mark.parametrize(
    ("state", "member", "standby"),
    [
        (JobState.FINISHING, Finish(), FINISHED),
        (JobState.FINISHED, FINISHED, FINISHED),
        (JobState.FAILED, FAILED, FAILED),
    ],
)
def test_when_a_job_ends(state: JobState, member: Directive, standby: Directive) -> None:
    """Members finish first; a failed job ends every worker with status 1 and the reason."""
    assert asked(None, STAYER, state=state, detail="lost") == member
    assert asked(None, OTHER, state=state, detail="lost") == standby


FOLLOWER = (ShadowAssignment(member=JOINER, rank=1, stay=True),)
REHEARSES = (ShadowAssignment(member=JOINER, rank=1, stay=False),)


@pytest.mark.parametrize(
    ("shadows", "continues"), [(FOLLOWER, True), (HOT, False), (REHEARSES, False), ((), False)]
)
def test_a_step_may_be_finished_with_the_standby_that_followed_the_rank(
    shadows: tuple[ShadowAssignment, ...], continues: bool
) -> None:
    """Another joiner, or one that only rehearsed, has not computed the step."""
    found = asked(structs.replace(FAILOVER, phase=Phase.SYNC), STAYER, shadows=shadows)

    assert isinstance(found, Sync)
    assert found.continues is continues


@pytest.mark.parametrize(("shadows", "continues"), [(HOT, True), (REHEARSES, False), ((), False)])
def test_workers_wait_in_the_step_if_somebody_may_finish_it(
    shadows: tuple[ShadowAssignment, ...], continues: bool
) -> None:
    """Before the joiners are chosen."""
    moves = (Move(1, LEAVER),)
    plan = structs.replace(FAILOVER, phase=Phase.RECOVER, moves=moves)
    found = asked(plan, STAYER, shadows=shadows)

    assert isinstance(found, Hold)
    assert found.continues is continues


def test_a_standby_that_gives_the_rank_back_does_not_finish_the_step() -> None:
    """It is still named as the shadow of the rank, which it has become."""
    moves = (Move(1, JOINER, JOINER, source=STAYER),)
    plan = structs.replace(FAILOVER, phase=Phase.SYNC, moves=moves)
    found = asked(plan, STAYER, shadows=FOLLOWER)

    assert isinstance(found, Sync)
    assert not found.continues


def test_no_step_is_finished_after_a_return_to_a_snapshot() -> None:
    back = Rollback(5, 2)
    plan = structs.replace(FAILOVER, phase=Phase.SYNC, rollback=back)
    found = asked(plan, STAYER, shadows=FOLLOWER)

    assert isinstance(found, Sync)
    assert not found.continues

"""Which training time is lost, and to what."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.values import failover, member, plan, record, worker
from tmd.core.planning.goodput import (
    LossCause,
    LostTime,
    PhaseTime,
    ended,
    losses,
    phases_left,
    standstill,
)
from tmd.core.planning.migration import PAUSED, STOPPED, TABLE, is_live
from tmd.core.values.model import (
    Activity,
    ClusterView,
    HostStatus,
    JobState,
    Mark,
    Move,
    Phase,
    PlanKind,
)
from tmd.core.values.snapshots import Rollback
from tmd.testing.clients import worker_status

RECORD = record("h1", "h2")
MOVE = Move(rank=1, leaver=member("h2"))
LOSS = structs.replace(failover(RECORD, worker("h2")), moves=(MOVE,))


def host(name, activity=Activity.STUCK, **changes):
    status = structs.replace(worker_status(worker(name), activity=activity), **changes)
    return HostStatus(name, "i", workers=(status,))


def in_plan(under_way):
    return structs.replace(RECORD, plan=under_way)


def lost_in(under_way, *hosts):
    now = in_plan(under_way)
    return standstill(now, ClusterView(hosts=hosts, jobs=(now,)))


# --- standstill -----------------------------------------------------------------------------------


def test_a_job_without_a_live_plan_does_not_stand_still():
    assert standstill(RECORD, ClusterView(jobs=(RECORD,))) is None
    assert lost_in(plan(RECORD.membership)) is None


@pytest.mark.parametrize(("detail", "stands"), [(STOPPED, True), (PAUSED, False), ("", False)])
def test_a_failover_that_waits_for_the_end_of_a_pause_is_a_hold(detail, stands):
    """Its time is counted as it passes, and not again once the failover begins. A rank that hangs
    leaves all others in training."""
    hosts = (
        host("h1", Activity.TRAINING, epoch=1, stands_s=600.0),
        host("h2", epoch=1, stands_s=0.2),
    )
    held = structs.replace(RECORD, detail=detail)
    view = ClusterView(hosts=hosts, jobs=(held,), paused=True)

    before = LostTime(LossCause.INTERRUPTED_STEP, 600.0 * RECORD.world_size)
    at_first, at_the_end = losses(RECORD, held, view), losses(held, in_plan(LOSS), view)

    assert standstill(held, view) is (LossCause.HOLD if stands else None)
    assert (at_first, at_the_end) == (((before,), ()) if stands else ((), (before,)))
    assert losses(held, held, view) == ()


@pytest.mark.parametrize("phase", [p for p in TABLE if is_live(plan(RECORD.membership, phase=p))])
def test_a_planned_move_costs_time_only_while_it_switches(phase):
    lost = lost_in(plan(RECORD.membership, kind=PlanKind.PLANNED, phase=phase))

    assert (lost is LossCause.PLANNED_MOVE) == (phase is Phase.SWITCH)
    assert lost in (LossCause.PLANNED_MOVE, None)


def test_a_failover_without_a_fit_standby_is_a_hold():
    survivor = host("h1")
    standby = host("h3", Activity.STANDBY)
    rejected = structs.replace(LOSS, rejected=(worker("h3"),))

    assert lost_in(LOSS, survivor) is LossCause.HOLD
    assert lost_in(LOSS, survivor, standby) is LossCause.FAILOVER
    assert lost_in(rejected, survivor, standby) is LossCause.HOLD


def test_a_failover_with_too_few_standbys_is_a_hold():
    """One standby is fit for either rank, but takes only one."""
    three = record("h1", "h2", "h3")
    moves = tuple(Move(rank=rank, leaver=member(f"h{rank + 1}")) for rank in (1, 2))
    both = structs.replace(failover(three, worker("h2"), worker("h3")), moves=moves)
    now = structs.replace(three, plan=both)

    def lost(*hosts):
        return standstill(now, ClusterView(hosts=hosts, jobs=(now,)))

    survivor = host("h1", world_size=3)
    standbys = [host(name, Activity.STANDBY, world_size=3) for name in ("h4", "h5")]
    assert lost(survivor, standbys[0]) is LossCause.HOLD
    assert lost(survivor, *standbys) is LossCause.FAILOVER


@pytest.mark.parametrize("phase", [Phase.SYNC, Phase.RESUME])
def test_a_failover_that_has_its_joiner_does_not_hold(phase):
    assert lost_in(structs.replace(LOSS, phase=phase), host("h1")) is LossCause.FAILOVER


def test_a_broken_link_without_a_loss_does_not_hold():
    assert lost_in(failover(RECORD), host("h1"), host("h2")) is LossCause.FAILOVER


@pytest.mark.parametrize("state", [s for s in JobState if s is not JobState.RUNNING])
def test_a_job_that_has_ended_loses_nothing(state):
    over = structs.replace(in_plan(LOSS), state=state)

    assert standstill(over, ClusterView(jobs=(over,))) is None


# --- known at once --------------------------------------------------------------------------------


def test_the_interrupted_step_counts_from_the_last_commit_of_a_survivor():
    """What the dead worker reported says nothing; it may have stood for long."""
    view = ClusterView(hosts=(host("h1", stands_s=3.0), host("h2", stands_s=0.5)))

    assert losses(RECORD, in_plan(LOSS), view) == (LostTime(LossCause.INTERRUPTED_STEP, 6.0),)
    assert losses(in_plan(LOSS), in_plan(LOSS), view) == ()


def test_a_survivor_that_is_not_heard_from_adds_nothing():
    assert losses(RECORD, in_plan(LOSS), ClusterView()) == (
        LostTime(LossCause.INTERRUPTED_STEP, 0.0),
    )


def test_repeated_steps_count_once_when_the_rollback_is_ordered():
    view = ClusterView(hosts=(host("h1", step_seconds=2.0), host("h2", step_seconds=4.0)))
    back = in_plan(structs.replace(LOSS, rollback=Rollback(step=10, repeats=5)))

    assert losses(in_plan(LOSS), back, view) == (LostTime(LossCause.REPEATED_STEPS, 30.0),)
    assert losses(back, back, view) == ()


def test_a_planned_move_loses_nothing_at_once():
    under_way = plan(RECORD.membership, phase=Phase.PREPARE)

    assert losses(RECORD, in_plan(under_way), ClusterView(hosts=(host("h1", stands_s=3.0),))) == ()


# --- phases ---------------------------------------------------------------------------------------


def timed(*marks, **changes):
    marked = tuple(Mark(phase, at) for phase, at in marks)
    return structs.replace(LOSS, phase=marks[-1][0], timeline=marked, **changes)


BEGUN = timed((Phase.RECOVER, 10.0))
SYNCING = timed((Phase.RECOVER, 10.0), (Phase.SYNC, 12.5))
DONE = timed((Phase.RECOVER, 10.0), (Phase.SYNC, 12.5), (Phase.RESUME, 13.0), (Phase.DONE, 14.0))


def test_each_phase_that_was_left_has_its_duration():
    kind = PlanKind.FAILOVER

    assert phases_left(RECORD, in_plan(BEGUN)) == ()
    assert phases_left(in_plan(BEGUN), in_plan(SYNCING)) == (PhaseTime(kind, Phase.RECOVER, 2.5),)
    assert phases_left(in_plan(SYNCING), in_plan(DONE)) == (
        PhaseTime(kind, Phase.SYNC, 0.5),
        PhaseTime(kind, Phase.RESUME, 1.0),
    )
    assert phases_left(in_plan(DONE), in_plan(DONE)) == ()


def test_a_clock_that_was_set_back_gives_no_negative_duration():
    back = timed((Phase.RECOVER, 10.0), (Phase.SYNC, 8.0))

    assert [t.seconds for t in phases_left(in_plan(BEGUN), in_plan(back))] == [0.0]


def test_a_plan_ends_once():
    assert ended(RECORD, in_plan(BEGUN)) is None
    assert ended(in_plan(BEGUN), in_plan(SYNCING)) is None
    assert ended(in_plan(SYNCING), in_plan(DONE)) is DONE
    assert ended(in_plan(DONE), in_plan(DONE)) is None


def test_an_overtaken_plan_ends_although_another_one_is_live():
    """Both changes are in one revision."""
    before = in_plan(structs.replace(BEGUN, id="job-1", phase=Phase.RECOVER))
    dropped = timed((Phase.RECOVER, 10.0), (Phase.ABORTED, 11.0), id="job-1")
    after = structs.replace(in_plan(BEGUN), history=(dropped,))

    assert ended(before, after) is dropped
    assert [t.seconds for t in phases_left(before, after)] == [1.0]

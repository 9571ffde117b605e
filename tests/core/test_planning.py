"""What the leader makes of a job at each look: one change at a time, or none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests import values
from tests.core.clusters import STEP, Scene
from tmd.core.planning.links import LINK_BROKEN
from tmd.core.planning.migration import PAUSED, STOPPED, is_live
from tmd.core.planning.planning import steer
from tmd.core.values.limits import PlanLimits, ShadowGoals
from tmd.core.values.model import (
    Activity,
    JobRecord,
    JobState,
    MigrationPlan,
    Move,
    Phase,
    PlanKind,
    ShadowAssignment,
    Urgency,
    Verdict,
)
from tmd.core.values.requests import DrainRequest

LIMITS = PlanLimits(hold_s=100.0)


def steered(scene: Scene, *verdicts: Verdict, age: float = 0.0) -> JobRecord:
    return steer(scene.record, scene.view, verdicts, now=50.0, age=age, limits=LIMITS)


def failed(host: str, **changes: object) -> Verdict:
    plain = Verdict("job", values.worker(host), Urgency.FAILED, "trainer.exited", "killed", "p")
    return structs.replace(plain, **changes)


def live(record: JobRecord) -> MigrationPlan:
    assert record.plan is not None
    assert is_live(record.plan)
    return record.plan


def moving(phase: Phase, *, armed: bool = True) -> Scene:
    """Rank 0 moves from h0 to s0, and the plan is in ``phase``."""
    scene = Scene(2, standbys=1)
    membership = scene.record.membership
    joiner = values.member("s0")
    plan = values.plan(
        membership,
        phase=phase,
        new=membership.replaced({0: joiner}, 2),
        moves=(Move(0, membership.members[0], joiner),),
    )
    done = phase in (Phase.SWITCH, Phase.RESUME)
    members = plan.new if done else membership
    scene.record = structs.replace(scene.record, plan=plan, proposed=2, membership=members)
    for rank, host in enumerate(scene.ranks):
        more = {"armed": 2, "plan": plan.id} if armed else {}
        scene.says(host, Activity.TRAINING, rank=rank, epoch=1, step=STEP, **more)
    return scene


# --- nothing to do --------------------------------------------------------------------------------


def test_a_job_that_trains_is_left_alone() -> None:
    """Its record stays the same object: there is no revision without a change."""
    scene = Scene(3, standbys=1)

    assert steered(scene, age=1e9) is scene.record


def test_a_verdict_on_another_job_or_on_no_holder_changes_nothing() -> None:
    scene = Scene(3, standbys=1)
    verdicts = (failed("h1", job="another"), failed("s0"), failed("nowhere"))

    assert steered(scene, *verdicts) is scene.record


# --- losses ---------------------------------------------------------------------------------------


def test_a_worker_that_may_report_yet_is_not_named_dead() -> None:
    """After an outage of Redis hosts that are well report one after the other. Its exit, or a
    finding of its own host about it, counts at once."""
    scene = Scene(3, standbys=1)
    scene.silent.add("h1")

    def named(silence_s: float) -> JobRecord:
        worker = values.worker("h1")
        return steer(
            scene.record,
            scene.view,
            [failed("h1", cause="host.silent")],
            now=50.0,
            age=1e9,
            limits=LIMITS,
            silences={worker: silence_s},
        )

    assert named(LIMITS.unheard_s - 0.1) is scene.record
    assert live(named(LIMITS.unheard_s)).dead == (values.worker("h1"),)
    scene.silent.clear()
    assert live(named(0.0)).dead == (values.worker("h1"),)
    scene.exit("h1", -9)
    assert live(named(0.0)).dead == (values.worker("h1"),)


def test_all_that_are_named_dead_at_once_are_in_one_failover() -> None:
    after = steered(Scene(3, standbys=2), failed("h0"), failed("h2"), failed("h0"))

    assert live(after).dead == (values.worker("h0"), values.worker("h2"))
    assert after.revision == 2


def test_who_is_named_already_is_not_named_again() -> None:
    """The verdict is repeated at each look."""
    scene = Scene(3, standbys=1)
    scene.fails("h1")

    assert steered(scene, failed("h1")) is scene.record


def test_members_that_are_stuck_though_nobody_died_run_the_step_again() -> None:
    """After a moment: as a rule somebody is named meanwhile."""
    scene = Scene(3, standbys=1)
    scene.says("h1", Activity.STUCK, rank=1, epoch=1, step=STEP)
    early = steered(scene, age=LIMITS.settle_s - 0.1)
    late = live(steered(scene, age=LIMITS.settle_s))

    assert early is scene.record
    assert (late.kind, late.dead, late.cause) == (PlanKind.FAILOVER, (), LINK_BROKEN)


def test_what_a_member_said_in_an_older_epoch_is_over() -> None:
    scene = Scene(3)
    scene.says("h1", Activity.STUCK, rank=1, epoch=0, step=STEP)

    assert steered(scene, age=1e9) is scene.record


def test_a_joiner_that_refuses_after_the_switch_is_replaced() -> None:
    """The leaver still has the state."""
    scene = moving(Phase.SWITCH)
    plan = live(scene.record)
    scene.says("s0", Activity.REFUSED, plan=plan.id, detail="it does not fit")
    after = live(steered(scene))

    assert (after.cause, after.reason) == ("joiner.refused", "it does not fit")
    assert after.dead == (values.worker("s0"),)


def test_a_leaver_that_is_lost_before_it_gave_its_state_is_a_failover() -> None:
    scene = moving(Phase.SWITCH)
    scene.exit("h0", -9)
    after = live(steered(scene))

    assert (after.cause, after.dead) == ("leaver.lost", (values.worker("h0"),))


def test_a_joiner_that_does_not_take_over_in_time_is_replaced() -> None:
    scene = moving(Phase.SWITCH)
    early = steered(scene, age=LIMITS.switch_s)
    after = live(steered(scene, age=LIMITS.switch_s + 1))

    assert early is scene.record
    assert (after.cause, after.dead) == ("joiner.late", (values.worker("s0"),))


@pytest.mark.parametrize(
    ("step", "entered", "leaver_heard", "moved"),
    [
        (STEP + 1, STEP, False, True),
        (STEP, STEP, True, False),
        # A release that does not report at which step it has entered: the leaver knows.
        (STEP + 1, None, True, True),
        (STEP + 1, None, False, False),
    ],
)
def test_a_joiner_whose_daemon_is_down_counts_by_what_others_have_committed(
    step: int, entered: int | None, leaver_heard: bool, moved: bool
) -> None:
    """It votes on each step: if others have committed one in the new epoch, it trains."""
    scene = moving(Phase.SWITCH)
    scene.silent.add("s0")
    scene.says("h1", Activity.TRAINING, rank=1, epoch=2, step=step, entered=entered)
    if leaver_heard:
        scene.says("h0", Activity.LEFT, epoch=1, step=STEP)
    else:
        scene.silent.add("h0")
    after = steered(scene, age=LIMITS.switch_s + 1)

    assert after.plan is not None
    if moved:
        assert (after.plan.kind, after.plan.phase) == (PlanKind.PLANNED, Phase.DONE)
    else:
        assert (after.plan.kind, after.plan.cause) == (PlanKind.FAILOVER, "joiner.late")


def test_a_leaver_may_be_lost_once_others_have_committed_with_its_joiner() -> None:
    """Nothing is heard of the joiner, which has the state."""
    scene = moving(Phase.SWITCH)
    scene.silent.add("s0")
    scene.says("h1", Activity.TRAINING, rank=1, epoch=2, step=STEP + 1, entered=STEP)
    scene.exit("h0", 0)
    after = steered(scene)

    assert after.plan is not None
    assert (after.plan.kind, after.plan.phase) == (PlanKind.PLANNED, Phase.DONE)


def test_a_move_ends_also_if_nobody_tells_its_first_step() -> None:
    """An earlier release runs on the joiner's host, and the leaver has ended."""
    scene = moving(Phase.SWITCH)
    scene.exit("h0", 0)
    scene.says("s0", Activity.TRAINING, rank=0, epoch=2, step=STEP + 1)
    after = steered(scene)

    assert after.plan is not None
    assert (after.plan.kind, after.plan.phase) == (PlanKind.PLANNED, Phase.DONE)


@pytest.mark.parametrize("step", [STEP, STEP + 1])
def test_a_move_is_over_once_the_joiner_has_committed_its_first_step(step: int) -> None:
    """Until then the leaver has the state, also while nothing is heard of the leaver."""
    scene = moving(Phase.SWITCH)
    scene.silent.add("h0")
    scene.says("s0", Activity.TRAINING, rank=0, epoch=2, step=step, entered=STEP)
    after = steered(scene)

    assert after.plan is not None
    assert after.plan.phase is (Phase.DONE if step > STEP else Phase.SWITCH)


# --- a plan under way -----------------------------------------------------------------------------


def test_a_member_that_cannot_switch_ends_a_move_at_once() -> None:
    """It says why; the others may be armed, so they disarm first."""
    scene = moving(Phase.READY)
    plan = live(scene.record)
    scene.says(
        "h1", Activity.TRAINING, rank=1, epoch=1, step=STEP, plan=plan.id, detail="out of memory"
    )
    after = live(steered(scene))

    assert after.phase is Phase.DISARM
    assert after.outcome == "rank 1 cannot switch: out of memory"


@pytest.mark.parametrize("changes", [{"plan": "earlier"}, {"armed": 2}])
def test_a_remark_of_a_member_ends_no_move(changes: dict[str, object]) -> None:
    """About an earlier plan, or of a rank that is armed."""
    scene = moving(Phase.READY)
    about = {"plan": live(scene.record).id, "detail": "out of memory", **changes}
    scene.says("h1", Activity.TRAINING, rank=1, epoch=1, step=STEP, **about)

    assert live(steered(scene)).phase is Phase.READY


def test_a_switch_makes_the_new_membership_that_of_the_job() -> None:
    """One worker that knows the vote is enough."""
    scene = moving(Phase.READY)
    plan = live(scene.record)
    scene.says("h1", Activity.TRAINING, rank=1, epoch=2, step=STEP, plan=plan.id)
    after = steered(scene)

    assert live(after).phase is Phase.SWITCH
    assert after.membership == plan.new


def test_a_move_that_is_not_ready_in_time_is_dropped() -> None:
    """Training does not notice; what the workers measured for the plan is kept."""
    scene = moving(Phase.PREPARE)
    plan = live(scene.record)
    scene.says("s0", Activity.SHADOWING, plan=plan.id, timings={"prepare": 2.0})
    early = steered(scene, age=LIMITS.prepare_s)
    after = steered(scene, age=LIMITS.prepare_s + 1)

    assert early is scene.record
    assert [(p.phase, p.timings) for p in after.history] == [(Phase.ABORTED, {"prepare": 2.0})]
    assert after.membership == scene.record.membership


def test_a_joiner_that_is_lost_is_not_tried_again() -> None:
    scene = moving(Phase.PREPARE)
    scene.exit("s0", -9)

    assert steered(scene).history[-1].rejected == (values.worker("s0"),)


def test_a_recovery_that_waits_says_for_what_and_gives_up_in_the_end() -> None:
    """Not at once: as a rule it is over in milliseconds."""
    scene = Scene(3)
    scene.fails("h1")
    for host in ("h0", "h2"):
        scene.halts(host)
    at_once = steered(scene)
    scene.record = steered(scene, age=LIMITS.settle_s)
    waits = scene.record.detail
    same = steered(scene, age=LIMITS.settle_s + 1)
    after = steered(scene, age=LIMITS.hold_s + 1)

    assert at_once.detail == ""
    assert waits.startswith("no standby for rank 1: ")
    assert same is scene.record
    assert after.state is JobState.FAILED
    assert after.detail == f"gave up after 100 s: {waits}"


def test_a_witness_that_stays_silent_is_named_too() -> None:
    scene = Scene(3, standbys=2)
    scene.fails("h1")
    scene.halts("h0")
    scene.silent.add("h2")
    scene.record = structs.replace(steered(scene, age=1.0))
    after = live(steered(scene, age=LIMITS.silent_s + 0.1))

    assert after.dead == (values.worker("h1"), values.worker("h2"))


@pytest.mark.parametrize("phase", [Phase.SYNC, Phase.RESUME])
def test_a_former_holder_that_ends_once_all_are_synced_costs_nothing(phase: Phase) -> None:
    """It was a witness, since it held the state of a rank, such as the leaver of a dropped move."""
    scene = Scene(2)
    plan = scene.fails("h1")
    new = plan.new.replaced({1: values.member("s0")}, plan.new.epoch)
    witnesses = (*plan.witnesses, values.member("x"))
    plan = structs.replace(plan, phase=phase, resume=STEP, new=new, witnesses=witnesses)
    members = new if phase is Phase.RESUME else scene.record.membership
    scene.record = structs.replace(scene.record, plan=plan, membership=members)
    scene.exit("x", 1)
    after = live(steered(scene, failed("x")))

    assert (after == plan) is (phase is Phase.RESUME)
    assert (values.worker("x") in after.dead) is (phase is Phase.SYNC)


def test_a_joiner_that_does_not_sync_in_time_is_last_in_line_then() -> None:
    """One that refused is out of it."""
    scene = Scene(2, standbys=2)
    scene.fails("h1")
    scene.halts("h0")
    scene.record = steered(scene)
    plan = live(scene.record)
    assert (plan.phase, plan.moves[0].joiner) == (Phase.SYNC, values.member("s0"))
    scene.says("h0", Activity.SYNCED, rank=0, epoch=1, step=STEP, plan=plan.id)
    late = live(steered(scene, age=LIMITS.sync_s + 1))
    scene.says("s0", Activity.REFUSED, plan=plan.id, detail="no memory")
    refused = live(steered(scene))

    assert (late.phase, late.late, late.rejected) == (Phase.RECOVER, (values.worker("s0"),), ())
    assert (refused.phase, refused.late, refused.rejected) == (
        Phase.RECOVER,
        (),
        (values.worker("s0"),),
    )


@pytest.mark.parametrize("step", [STEP - 1, STEP, STEP + 1])
def test_a_worker_is_synced_only_for_the_resume_step_of_the_plan_as_it_is_now(step: int) -> None:
    """A plan that is reopened keeps its id, and a report of its former step may come late."""
    scene = Scene(2, standbys=1)
    scene.fails("h1")
    scene.halts("h0")
    scene.record = steered(scene)
    plan = live(scene.record)
    scene.says("h0", Activity.SYNCED, rank=0, epoch=1, step=step, plan=plan.id)
    scene.says("s0", Activity.SYNCED, step=STEP, plan=plan.id)

    assert plan.resume == STEP
    assert live(steered(scene)).phase is (Phase.RESUME if step == STEP else Phase.SYNC)


def test_standbys_are_studied_only_when_nothing_else_is_to_be_done() -> None:
    scene = Scene(2, standbys=1)

    def look(*verdicts: Verdict) -> JobRecord:
        return steer(
            scene.record,
            scene.view,
            verdicts,
            now=0.0,
            age=0.0,
            limits=LIMITS,
            wanted=ShadowGoals(hot=1),
        )

    assert [u.member.host for u in look().shadows] == ["s0"]
    assert look(failed("h1")).shadows == ()


# --- a paused cluster -----------------------------------------------------------------------------


def paused(scene: Scene, *verdicts: Verdict) -> JobRecord:
    """The next revision while the cluster of ``scene`` is paused."""
    view = structs.replace(scene.view, paused=True)
    wanted = ShadowGoals(hot=1)
    return steer(scene.record, view, verdicts, now=0.0, age=60.0, limits=LIMITS, wanted=wanted)


def test_a_pause_holds_plans_that_would_open_and_says_so() -> None:
    """Standbys still get their work: the first loss after the pause needs them."""
    scene = Scene(2, standbys=1)
    drained = paused(scene, Verdict("job", values.worker("h0"), Urgency.DRAIN, "drain", "asked"))
    lost = paused(scene, failed("h1"))
    scene.record = lost

    assert (drained.plan, drained.detail) == (None, PAUSED)
    assert [u.member.host for u in drained.shadows] == ["s0"]
    assert (lost.plan, lost.detail) == (None, STOPPED)
    assert lost.shadows == ()
    assert paused(scene, failed("h1")) is lost


@pytest.mark.parametrize(("stands_s", "goes_on"), [(600.0, False), (0.1, True)])
def test_what_a_pause_holds_is_not_forgotten_before_a_step_is_committed(
    stands_s: float, goes_on: bool
) -> None:
    """A rank hangs, and for a moment no policy says so: it is new, or slow."""
    scene = Scene(2, standbys=1)
    for rank, host in enumerate(scene.ranks):
        says = {"rank": rank, "epoch": 1, "step": STEP, "stands_s": stands_s}
        scene.says(host, Activity.TRAINING, **says)
    held = scene.record = paused(scene, failed("h1"))
    drain = Verdict("job", values.worker("h0"), Urgency.DRAIN, "drain", "asked")

    assert held.detail == STOPPED
    assert (paused(scene) is held) is not goes_on
    assert (paused(scene, drain) is held) is not goes_on


def test_a_pause_leaves_a_standby_alone_that_may_have_the_only_state_of_a_lost_rank() -> None:
    """Also if its host is drained meanwhile, or silent for a while."""
    scene = Scene(2, standbys=1)
    shadow = ShadowAssignment(member=values.member("s0"), rank=1, stay=True)
    scene.record = structs.replace(scene.record, shadows=(shadow,))
    drains = (DrainRequest("s0", "r", leave=True),)
    view = structs.replace(scene.view, paused=True, drains=drains)
    held = steer(scene.record, view, [failed("h1")], now=0.0, age=60.0, limits=LIMITS)

    assert held.detail == STOPPED
    assert (held.shadows, held.dismissed) == ((shadow,), ())


def test_a_pause_holds_no_plan_that_is_live() -> None:
    under_way = moving(Phase.PREPARE)

    assert live(paused(under_way, failed("h1"))).kind is PlanKind.FAILOVER
    assert paused(under_way).detail == ""


def test_after_a_pause_the_reason_is_gone() -> None:
    scene = Scene(2, standbys=1)
    held = paused(scene, failed("h1"))
    scene.record = held
    opened = steer(held, scene.view, [failed("h1")], now=0.0, age=60.0, limits=LIMITS)
    quiet = steer(held, scene.view, [], now=0.0, age=60.0, limits=LIMITS)

    assert (live(opened).kind, opened.detail) == (PlanKind.FAILOVER, "")
    assert quiet.detail == ""


# --- whatever is said -----------------------------------------------------------------------------

WORD = st.sampled_from(["", "job-2", "older", "x" * 300])


@settings(deadline=None)
@given(data=st.data())
def test_no_word_of_a_worker_makes_the_leader_fail_or_forget(data: st.DataObject) -> None:
    """Statuses at random, about any plan: at each look one revision or none, ranks and old epochs
    stay what they are, and a live plan ends or goes on."""
    scene = Scene(3, standbys=2)
    record = scene.record
    for _ in range(data.draw(st.integers(1, 6))):
        for host in (*scene.ranks, "s0", "s1"):
            scene.says(
                host,
                data.draw(st.sampled_from(Activity)),
                rank=data.draw(st.sampled_from([None, -1, 0, 1, 2, 3, 2**40])),
                epoch=data.draw(st.sampled_from([-1, 0, 1, 2, 3, 2**40])),
                step=data.draw(st.sampled_from([-1, 0, STEP, 2**40])),
                undecided=data.draw(st.booleans()),
                armed=data.draw(st.sampled_from([0, 2, 2**40])),
                plan=data.draw(WORD),
                replicas=data.draw(st.sampled_from([(), (0, 1, 2), (7,), (-1,)])),
                suspects=data.draw(st.sampled_from([(), (values.worker("h1"),), ("nobody",)])),
            )
        named = data.draw(st.sampled_from([(), (failed("h1"),), (failed("s0"),)]))
        scene.record = record
        after = steered(scene, *named, age=data.draw(st.sampled_from([0.0, 1.0, 1e9])))

        assert after.revision - record.revision == (after is not record)
        assert len(after.membership.members) == 3
        assert len({m.worker for m in after.membership.members}) == 3
        assert record.membership.epoch <= after.membership.epoch <= after.proposed
        assert record.proposed <= after.proposed <= record.proposed + 1
        assert after.history[: len(record.history)] == record.history
        record = after

"""Which step a job resumes at after a loss, who owns each rank, and what is waited for."""

import pytest
from msgspec import structs

from tests import values
from tests.core.clusters import STEP, Scene
from tmd.core.planning import failover
from tmd.core.planning.migration import TABLE, PlanEvent, PlanFacts
from tmd.core.planning.planning import steer
from tmd.core.values.errors import IllegalTransition
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import (
    Activity,
    ClusterView,
    Exit,
    HostStatus,
    JobRecord,
    JobState,
    Member,
    MigrationPlan,
    Move,
    Phase,
    PlanKind,
    Severity,
    ShadowStatus,
    Strategy,
)
from tmd.core.values.snapshots import Kept, Rollback

HOSTS = ("h1", "h2")
LIMITS = PlanLimits()


def settled(*codes: int | None) -> tuple[JobState, str]:
    """All workers of the job end; what becomes of it, and what is waited for."""
    record = values.record(*HOSTS)
    plan = structs.replace(
        values.failover(record, *map(values.worker, HOSTS)), witnesses=record.membership.members
    )
    record = structs.replace(record, plan=plan)
    hosts = tuple(
        HostStatus(host, "1", exits=(Exit(values.worker(host), record.job, code, 0.0),))
        for host, code in zip(HOSTS, codes, strict=True)
    )
    facts = PlanFacts(ClusterView(hosts=hosts, jobs=(record,)), record.job)
    after, missing = failover.settle(record, plan, facts, (), 0.0)
    return after.state, missing


@pytest.mark.parametrize("codes", [(None, None), (-9, None), (None, -9)])
def test_the_outcome_waits_for_an_unknown_exit_status(
    codes: tuple[int | None, ...],
) -> None:
    """A script may end with ``os._exit(0)``: that it was no failure is known a moment later."""
    state, missing = settled(*codes)

    assert state is JobState.RUNNING
    assert missing.startswith("waiting for the exit status of")


def test_a_job_without_workers_has_failed() -> None:
    """The job has failed once it is known how its workers ended."""
    assert settled(-9, 1)[0] is JobState.FAILED


# --- who is asked ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 7))
def test_every_other_rank_is_asked_once_and_the_keepers_first(size: int) -> None:
    for rank in range(size):
        asked = failover.keepers_first(rank, size)
        others = [r for r in range(size) if r != rank]

        assert sorted(asked) == others
        assert list(asked[:2]) == [(rank + n) % size for n in (1, 2)][: len(others)]


# --- opening --------------------------------------------------------------------------------------


def opened(record: JobRecord, *dead: str) -> JobRecord:
    return failover.open_failover(record, dead, "trainer.exited", "killed", "p", 5.0)


def planned(record: JobRecord, phase: Phase, joiner: Member) -> JobRecord:
    """A planned move of rank 0 to ``joiner`` is under way."""
    leaver = record.membership.members[0]
    plan = values.plan(
        record.membership,
        phase=phase,
        new=record.membership.replaced({0: joiner}, record.proposed + 1),
        moves=(Move(0, leaver, joiner),),
    )
    return structs.replace(record, plan=plan, proposed=record.proposed + 1)


def live(record: JobRecord) -> MigrationPlan:
    assert record.plan is not None
    return record.plan


def test_a_failover_names_the_dead_and_asks_all_members() -> None:
    """Its epoch was never proposed before."""
    before = Scene(3).record
    after = opened(before, values.worker("h1"))
    plan = live(after)

    assert (plan.kind, plan.phase) == (PlanKind.FAILOVER, Phase.RECOVER)
    assert (plan.dead, plan.witnesses) == ((values.worker("h1"),), before.membership.members)
    assert plan.moves == (Move(1, before.membership.members[1]),)
    assert (plan.cause, plan.reason, plan.policy) == ("trainer.exited", "killed", "p")
    assert (plan.new.epoch, after.proposed) == (2, 2)
    assert after.membership == before.membership


def test_a_worker_without_a_rank_leaves_nothing_to_move() -> None:
    """A leader may name a worker that has just been replaced."""
    assert live(opened(Scene(3).record, "nobody/job/0.a")).moves == ()


@pytest.mark.parametrize(
    ("phase", "asked"),
    [(Phase.PREPARE, False), (Phase.READY, True), (Phase.DISARM, True), (Phase.SWITCH, True)],
)
def test_a_loss_drops_a_planned_move_and_asks_its_parties(phase: Phase, asked: bool) -> None:
    """Once the arms are out its joiner may have taken the rank."""
    joiner = values.member("s0")
    before = planned(Scene(3).record, phase, joiner)
    after = opened(before, values.worker("h1"))
    dropped = after.history[-1]

    assert (joiner in live(after).witnesses) is asked
    assert len(set(live(after).witnesses)) == len(live(after).witnesses)
    assert (dropped.phase, dropped.id) == (Phase.ABORTED, live(before).id)
    assert dropped.outcome == f"overtaken by {live(after).id}: killed"
    assert after.proposed == before.proposed + 1


@pytest.mark.parametrize("phase", [Phase.RECOVER, Phase.SYNC])
def test_another_loss_extends_the_failover_under_way(phase: Phase) -> None:
    """A joiner that is synced holds a state, so it is asked as well."""
    scene = Scene(3)
    plan = scene.fails("h1")
    joiner = values.member("s0")
    plan = structs.replace(plan, phase=phase, resume=STEP, new=plan.new.replaced({1: joiner}, 2))
    before = structs.replace(scene.record, plan=plan, proposed=2)
    after = opened(before, values.worker("h2"), values.worker("h1"))
    now = live(after)

    assert (now.id, now.phase, now.resume) == (plan.id, Phase.RECOVER, None)
    assert now.dead == (values.worker("h1"), values.worker("h2"))
    assert [m.rank for m in now.moves] == [1, 2]
    assert joiner in now.witnesses
    assert (now.cause, now.reason) == (plan.cause, plan.reason), "the first loss is the cause"
    assert (after.proposed, after.history) == (before.proposed, before.history)


def test_a_broken_link_is_explained_once_somebody_is_named() -> None:
    scene = Scene(3)
    scene.fails()
    after = opened(scene.record, values.worker("h2"))

    assert (live(after).cause, live(after).reason) == ("trainer.exited", "killed")


def test_a_loss_in_the_new_epoch_is_another_failover() -> None:
    """From RESUME on the change is committed."""
    scene = Scene(3)
    plan = structs.replace(scene.fails("h1"), phase=Phase.RESUME, resume=STEP)
    before = structs.replace(scene.record, plan=plan, membership=plan.new, proposed=2)
    after = opened(before, values.worker("h2"))

    assert live(after).id != plan.id
    assert live(after).new.epoch == 3
    assert [(p.id, p.phase) for p in after.history] == [(plan.id, Phase.DONE)]


def test_the_history_of_a_job_is_bounded() -> None:
    record = Scene(1).record
    for number in range(60):
        record = failover.archived(
            record, structs.replace(values.plan(record.membership), id=f"{number}")
        )

    assert [p.id for p in record.history] == [str(n) for n in range(10, 60)]


@pytest.mark.parametrize(
    "phase", [p for p in Phase if PlanEvent.JOINER_LOST not in TABLE[p]], ids=str
)
def test_a_plan_whose_phase_has_no_joiner_is_not_reopened(phase: Phase) -> None:
    """The table refuses, and the record stays as it is."""
    scene = Scene(3)
    plan = structs.replace(scene.fails("h1"), phase=phase)
    record = structs.replace(scene.record, plan=plan)
    before = structs.replace(record)
    with pytest.raises(IllegalTransition):
        failover.reopened(record, plan, PlanEvent.JOINER_LOST, "", 1.0)

    assert record == before


def test_a_reopened_plan_remembers_who_failed_and_who_was_late() -> None:
    scene = Scene(3)
    plan = structs.replace(
        scene.fails("h1"), phase=Phase.SYNC, resume=STEP, rejected=("a",), late=("b",)
    )
    after = failover.reopened(
        scene.record, plan, PlanEvent.JOINER_LOST, "x", 9.0, rejected=("a", "c"), late=("d",)
    )

    assert (live(after).phase, live(after).resume) == (Phase.RECOVER, None)
    assert (live(after).rejected, live(after).late) == (("a", "c"), ("b", "d"))
    assert [m.joiner for m in live(after).moves] == [None]


# --- settling -------------------------------------------------------------------------------------


def settle(scene: Scene, *spare: str) -> tuple[JobRecord, str]:
    candidates = [values.member(host) for host in spare]
    return failover.settle(scene.record, scene.plan, scene.facts, candidates, 6.0)


def lost_one(size: int = 3) -> Scene:
    """Rank 1 is dead, all others have halted at the same step, and there are two standbys."""
    scene = Scene(size, standbys=2)
    scene.fails("h1")
    for host in scene.ranks:
        if host != "h1":
            scene.halts(host)
    return scene


def test_nothing_is_settled_before_all_that_may_hold_a_state_have_halted() -> None:
    scene = lost_one()
    scene.says("h2", Activity.TRAINING, rank=2, epoch=1, step=STEP)
    record, missing = settle(scene, "s0")

    assert record is scene.record
    assert missing == f"waiting for {values.worker('h2')} to halt"


def test_who_halted_for_another_plan_has_not_halted() -> None:
    """What it said was true of an earlier recovery."""
    scene = lost_one()
    scene.halts("h2", plan="older")

    assert settle(scene, "s0")[1] == f"waiting for {values.worker('h2')} to halt"


def test_a_dead_rank_goes_to_the_first_standby_which_copies_a_replica() -> None:
    scene = lost_one()
    record, missing = settle(scene, "s0", "s1")
    plan = live(record)

    assert missing == ""
    assert (plan.phase, plan.resume, plan.floor) == (Phase.SYNC, STEP, STEP)
    dead, joiner, source = scene.record.membership.members[1], *map(values.member, ("s0", "h2"))
    assert plan.moves == (Move(1, dead, joiner, source),)
    assert plan.new.members == (values.member("h0"), joiner, values.member("h2"))


def test_the_source_is_a_replica_that_keeps_the_buffers_of_the_rank() -> None:
    """Before the usual keepers."""
    scene = lost_one(4)
    scene.halts("h0", holds=(1,))
    (move,) = live(settle(scene, "s0")[0]).moves

    assert move.source == values.member("h0")


def test_all_resume_at_the_highest_committed_step() -> None:
    """Who is one behind has its own complete gradients; who is not is no owner any more."""
    scene = lost_one()
    scene.halts("h0", step=STEP + 1)
    scene.halts("h2", undecided=True)

    assert live(settle(scene, "s0")[0]).resume == STEP + 1


def test_an_owner_that_cannot_reach_the_step_is_replaced_by_a_copy() -> None:
    """A leaver claims its rank, but its joiner had committed before it died."""
    scene = lost_one()
    scene.halts("h0", step=STEP + 1)
    scene.halts("h2", step=STEP)
    plan = live(settle(scene, "s0", "s1")[0])

    assert [(m.rank, m.source) for m in plan.moves] == [
        (1, values.member("h0")),
        (2, values.member("h0")),
    ]


def test_an_owner_that_cannot_reach_the_step_and_has_no_replica_goes_back_with_all() -> None:
    """To wait for it would be in vain: its joiner, which had the state, is dead."""
    scene = lost_one()
    kept = {
        rank: tuple(Kept(r, STEP - 2) for r in ranks) for rank, ranks in ((0, (0, 1)), (2, (2,)))
    }
    scene.halts("h0", step=STEP + 1, replicas=(0, 1), kept=kept[0])
    scene.halts("h2", step=STEP, replicas=(2,), kept=kept[2])
    plan = live(settle(scene, "s0", "s1")[0])

    assert plan.rollback == Rollback(STEP - 2, repeats=3)
    assert plan.resume == STEP - 2
    assert [(m.rank, m.joiner) for m in plan.moves] == [(1, values.member("s0"))]


def test_an_owner_that_cannot_reach_the_step_without_replica_or_snapshot_is_lost() -> None:
    scene = lost_one()
    scene.halts("h0", step=STEP + 1, replicas=(0, 1))
    scene.halts("h2", step=STEP, replicas=(2,))
    record, missing = settle(scene, "s0", "s1")

    assert (record.state, missing) == (JobState.FAILED, "")
    assert record.detail.startswith("the state of rank 2 is lost without a replica")


def test_the_resume_step_never_falls_below_one_that_was_ordered() -> None:
    """Somebody may have rolled forward to it."""
    scene = lost_one()
    scene.record = structs.replace(scene.record, plan=structs.replace(scene.plan, floor=STEP + 1))
    for host in ("h0", "h2"):
        scene.halts(host, undecided=True)

    assert live(settle(scene, "s0")[0]).resume == STEP + 1


def test_a_rank_belongs_to_who_claims_it_in_the_highest_epoch() -> None:
    """A joiner that took the rank before the leaver heard of it."""
    scene = lost_one()
    joiner = values.member("s0")
    witnesses = (*scene.plan.witnesses, joiner)
    plan = structs.replace(scene.plan, witnesses=witnesses)
    scene.record = structs.replace(scene.record, plan=plan)
    scene.says("s0", Activity.STUCK, rank=0, epoch=2, step=STEP, plan=plan.id)
    moves = live(settle(scene, "s1")[0]).moves

    assert (moves[0].rank, moves[0].joiner, moves[0].source) == (0, joiner, None)


@pytest.mark.parametrize("rank", [None, -1, 3, 10**9])
def test_a_claim_on_no_rank_of_the_job_counts_for_nothing(rank: int | None) -> None:
    """A worker of another version, or one that lies, gets no place, takes nobody's, and is not
    waited for."""
    scene = lost_one()
    scene.halts("h2", rank=rank, step=0)
    record, _ = settle(scene, "s0", "s1")

    assert [m.rank for m in live(record).moves] == [1, 2]
    assert {m.joiner for m in live(record).moves} == {values.member("s0"), values.member("s1")}


def test_rejected_standbys_get_no_rank_and_late_ones_only_if_there_is_no_other() -> None:
    scene = lost_one()
    plan = structs.replace(scene.plan, late=(values.worker("s0"),))
    scene.record = structs.replace(scene.record, plan=plan)
    late = live(settle(scene, "s0", "s1")[0]).moves[0].joiner
    only = live(settle(scene, "s0")[0]).moves[0].joiner
    plan = structs.replace(plan, rejected=(values.worker("s0"),))
    scene.record = structs.replace(scene.record, plan=plan)
    none, missing = settle(scene, "s0")

    assert (late, only) == (values.member("s1"), values.member("s0"))
    assert none is scene.record
    assert missing.startswith("no standby for rank 1: ")


def alone() -> Scene:
    """Rank 1 is dead, and its state existed once."""
    scene = lost_one()
    for rank, host in enumerate(scene.ranks):
        if host != "h1":
            scene.halts(host, replicas=(rank,))
    return scene


def follows(scene: Scene, host: str, *, step: int = STEP, **changes: object) -> None:
    """A hot standby of rank 1 that is left alone, or not yet."""
    shadow = ShadowStatus(rank=1, copied=1.0, lag_s=0.0, verified=STEP - 1)
    fields = {"shadow": shadow, "step": step, **changes}
    activity = fields.pop("activity", Activity.STANDBY)
    assert isinstance(activity, Activity)
    scene.says(host, activity, **fields)


def test_a_state_that_existed_once_is_that_of_the_standby_that_shadowed_it() -> None:
    """It copies nothing."""
    scene = alone()
    follows(scene, "s1")
    (move,) = live(settle(scene, "s0", "s1")[0]).moves

    assert (move.joiner, move.source) == (values.member("s1"), None)


def test_of_two_shadows_the_one_that_was_late_before_comes_last() -> None:
    scene = alone()
    follows(scene, "s0")
    follows(scene, "s1")
    plan = structs.replace(scene.plan, late=(values.worker("s0"),))
    scene.record = structs.replace(scene.record, plan=plan)
    (move,) = live(settle(scene, "s0", "s1")[0]).moves

    assert move.joiner == values.member("s1")


def test_a_shadow_that_still_takes_in_the_last_step_is_waited_for() -> None:
    scene = alone()
    follows(scene, "s1", activity=Activity.IN_STEP, step=STEP - 1)
    record, missing = settle(scene, "s0", "s1")

    assert record is scene.record
    assert missing == (
        f"waiting for {values.worker('s1')}, the only one that has the state of a rank"
    )


@pytest.mark.parametrize("step", [0, STEP - 1, STEP + 1, 10**9])
def test_a_shadow_at_another_step_does_not_have_the_state(step: int) -> None:
    scene = alone()
    follows(scene, "s1", step=step)

    assert settle(scene, "s1")[0].state is JobState.FAILED


def test_without_any_copy_the_job_fails_and_says_which_state_is_lost() -> None:
    record, missing = settle(alone(), "s0")

    assert (record.state, missing) == (JobState.FAILED, "")
    assert record.detail.startswith("the state of rank 1 is lost without a replica")


def test_with_a_snapshot_of_all_ranks_all_go_back_to_it() -> None:
    """And stay decided to: whoever claims to have gone on is not asked again."""
    scene = alone()
    for rank, host in enumerate(scene.ranks):
        if host != "h1":
            kept = (Kept(rank, 4), Kept(1, 4)) if host == "h2" else (Kept(rank, 4),)
            scene.halts(host, replicas=(rank,), kept=kept)
    plan = live(settle(scene, "s0")[0])

    assert (plan.resume, plan.floor) == (4, 4)
    assert plan.rollback is not None
    assert (plan.rollback.step, plan.rollback.repeats) == (4, STEP - 4)
    assert plan.how == plan.rollback.sentence
    assert [(m.rank, m.source) for m in plan.moves] == [(1, values.member("h2"))]


# --- who is not heard -----------------------------------------------------------------------------


def test_a_finding_about_a_joiner_that_has_the_rank_already_changes_nothing() -> None:
    """It took rank 1 over just before a loss. Such a finding is for policies: refused as a joiner,
    it would get its own rank again, for ever."""
    scene = Scene(3, standbys=1)
    scene.fails("h0")
    joiner = values.member("s1")
    plan = structs.replace(scene.plan, witnesses=(*scene.plan.witnesses, joiner))
    scene.record = structs.replace(scene.record, plan=plan)
    scene.says("h1", Activity.STANDBY)
    scene.halts("h2")
    scene.says("s1", Activity.STUCK, rank=1, epoch=2, step=STEP, plan=plan.id)
    found = values.alert(
        id="1", entity=joiner.worker, severity=Severity.FATAL, strategy=Strategy.ACT, job="job"
    )
    hosts = [structs.replace(h, alerts=(found,)) if h.host == "s1" else h for h in scene.view.hosts]
    view = structs.replace(scene.view, hosts=tuple(hosts))
    first = steer(scene.record, view, (), now=1.0, age=0.0, limits=LIMITS)
    view = structs.replace(view, jobs=(first,))
    second = steer(first, view, (), now=2.0, age=0.0, limits=LIMITS)

    assert live(first).phase is Phase.SYNC
    assert {m.rank: m.joiner.worker for m in live(first).moves if m.joiner}[1] == joiner.worker
    assert second is first


def test_a_silent_witness_is_named_once_all_others_have_halted() -> None:
    """Before, nothing can be said: it may be the network of those that are heard."""
    scene = lost_one(4)
    scene.silent.add("h3")
    early = lost_one(4)
    early.silent.add("h3")
    early.says("h2", Activity.TRAINING, rank=2, epoch=1, step=STEP)

    assert failover.unheard(scene.plan, scene.facts) == (values.worker("h3"),)
    assert failover.unheard(early.plan, early.facts) == ()


def test_the_dead_and_the_ended_are_not_silent() -> None:
    scene = lost_one(4)
    scene.exit("h3", -9)

    assert failover.unheard(scene.plan, scene.facts) == ()

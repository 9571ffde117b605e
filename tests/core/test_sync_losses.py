"""Losses while joiners copy the state of lost ranks."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests import values
from tests.core.clusters import STEP, Scene
from tests.core.test_planning import LIMITS, live, steered
from tmd.core.planning.directives import Hold, directive_of
from tmd.core.values.model import Activity, JobState, MigrationPlan, Phase, ShadowStatus
from tmd.core.values.snapshots import Kept

ALL = (0, 1, 2)
LATE_S = LIMITS.silent_s + 0.1


def copying(
    size: int = 3, *, dead: tuple[str, ...] = ("h1",), standbys: int = 2, **survivor: object
) -> Scene:
    """Standbys copy the states of the lost ranks. ``survivor``: what each survivor reports."""
    scene = Scene(size, standbys=standbys)
    scene.fails(*dead)
    left = [host for host in scene.ranks if host not in dead]
    for host in left:
        scene.halts(host, **{"replicas": ALL[:size], **survivor})
    scene.record = steered(scene)
    plan = live(scene.record)
    assert plan.phase is Phase.SYNC
    for host in left:
        rank, epoch = scene.ranks.index(host), plan.new.epoch
        has: dict[str, object] = {"replicas": ALL[:size], **survivor}
        says = {"rank": rank, "epoch": epoch, "step": STEP, "plan": plan.id, **has}
        scene.says(host, Activity.SYNCED, **says)
    return scene


def joins(scene: Scene, host: str, activity: Activity, **more: object) -> None:
    """The standby on ``host`` reports ``activity``, with its rank if it has the state."""
    plan = live(scene.record)
    rank = next(m.rank for m in plan.moves if m.joiner == values.member(host))
    has = {"rank": rank, "epoch": plan.new.epoch, "step": STEP, "plan": plan.id}
    scene.says(host, activity, **{**(has if activity is Activity.SYNCED else {}), **more})


# --- a survivor that falls silent -----------------------------------------------------------------


def test_a_silent_survivor_is_named_too_if_others_have_its_state() -> None:
    """Nothing else would tell of it before the deadline: its peers wait for the leader alone."""
    scene = copying()
    scene.silent.add("h2")
    before = steered(scene, age=LIMITS.silent_s)
    after = live(steered(scene, age=LATE_S))

    assert live(before).phase is Phase.SYNC
    assert (after.phase, after.dead) == (Phase.RECOVER, (values.worker("h1"), values.worker("h2")))
    assert after.rejected == after.late == ()


def test_a_silent_survivor_is_waited_for_if_no_standby_could_take_its_rank() -> None:
    """The job would stand in any case, and its worker may be well."""
    scene = copying(standbys=1)
    scene.silent.add("h2")

    assert steered(scene, age=LATE_S) is scene.record


def test_the_hot_standby_of_a_silent_survivor_takes_its_rank() -> None:
    """Each state exists once."""
    scene = Scene(3, standbys=2)
    scene.fails("h1")
    for rank in (0, 2):
        scene.halts(f"h{rank}", replicas=(rank,))
    for number, rank in enumerate((1, 2)):
        shadow = ShadowStatus(rank, 1.0, verified=STEP)
        scene.says(f"s{number}", Activity.STANDBY, shadow=shadow, step=STEP)
    scene.record = steered(scene)
    plan = live(scene.record)
    for rank in (0, 2):
        says = {"rank": rank, "epoch": plan.new.epoch, "step": STEP, "plan": plan.id}
        scene.says(f"h{rank}", Activity.SYNCED, **says, replicas=(rank,))
    joins(scene, "s0", Activity.SYNCED, replicas=(1,))
    scene.silent.add("h2")
    after = live(steered(scene, age=LATE_S))

    assert plan.phase is Phase.SYNC
    assert after.dead == (values.worker("h1"), values.worker("h2"))


@pytest.mark.parametrize(
    ("kept", "named"), [((), False), (tuple(Kept(rank, STEP - 2) for rank in ALL), True)]
)
def test_a_silent_survivor_with_the_only_copy_is_waited_for(
    kept: tuple[Kept, ...], named: bool
) -> None:
    """Its worker may be well, while its daemon is not. A snapshot would do as well."""
    scene = copying(3, dead=("h0",), replicas=(0, 2), kept=kept)
    says = {"rank": 1, "epoch": 2, "step": STEP, "plan": live(scene.record).id}
    scene.says("h1", Activity.SYNCED, **says, replicas=(1,), kept=kept)
    scene.silent.add("h2")  # the only one that has the state of rank 0, and its own
    after = steered(scene, age=LATE_S)

    assert (live(after).phase is Phase.RECOVER) is named
    assert after.state is JobState.RUNNING


def test_a_pair_of_replicas_of_which_one_is_lost_is_not_given_up() -> None:
    """Two ranks: the source sends its state, and its daemon is away for a while."""
    scene = copying(2)
    scene.silent.add("h0")
    after = steered(scene, age=LATE_S)

    assert live(after).phase is Phase.SYNC
    assert after == scene.record


def test_a_joiner_that_has_its_state_counts_as_one_that_has_it() -> None:
    scene = copying(2)
    joins(scene, "s0", Activity.SYNCED, replicas=(0, 1))
    scene.silent.add("h0")
    after = live(steered(scene, age=LATE_S))

    assert after.dead == (values.worker("h1"), values.worker("h0"))
    assert values.member("s0") in after.witnesses


# --- a joiner that is lost ------------------------------------------------------------------------


def lost_joiner(scene: Scene) -> MigrationPlan:
    """The plan after the joiner on ``s1`` has refused."""
    scene.says("s1", Activity.REFUSED, plan=live(scene.record).id, detail="no memory")
    scene.record = steered(scene)
    plan = live(scene.record)
    assert (plan.phase, plan.rejected) == (Phase.RECOVER, (values.worker("s1"),))
    return plan


def test_a_synced_joiner_keeps_its_state_when_another_joiner_is_lost() -> None:
    scene = copying(dead=("h1", "h2"))
    joins(scene, "s0", Activity.SYNCED)
    plan = lost_joiner(scene)

    assert values.member("s0") in plan.witnesses
    assert values.member("s1") not in plan.witnesses
    assert isinstance(directive_of(scene.record, values.worker("s0")), Hold)


def test_a_joiner_without_a_state_is_not_waited_for() -> None:
    """It may be in the middle of a long step of a shadow."""
    scene = copying(dead=("h1", "h2"))
    joins(scene, "s0", Activity.SHADOWING)
    plan = lost_joiner(scene)
    scene.halts("h0", replicas=ALL)
    scene.says("s2", Activity.STANDBY)
    after = live(steered(scene))

    assert values.member("s0") not in plan.witnesses
    assert after.phase is Phase.SYNC


def test_a_joiner_with_the_only_copy_is_waited_for_although_it_is_silent() -> None:
    """Its daemon is restarted just when the other joiner is lost."""
    scene = copying(dead=("h1", "h2"))
    plan = live(scene.record)
    moves = tuple(
        structs.replace(m, source=None) if m.joiner == values.member("s0") else m
        for m in plan.moves
    )
    scene.record = structs.replace(scene.record, plan=structs.replace(plan, moves=moves))
    scene.says("s0", Activity.STANDBY, shadow=ShadowStatus(1, 1.0, verified=STEP))
    scene.silent.add("s0")
    plan = lost_joiner(scene)

    assert values.member("s0") in plan.witnesses
    assert plan.late == (values.worker("s0"),)

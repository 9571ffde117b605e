"""What a deadline of a job is counted from: the moment at which anything of it was different."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from tests import values
from tests.core.clusters import STEP, Scene
from tmd.core.planning.deadlines import LATE_S, Seen, after_outage, seen
from tmd.core.values.model import Activity, Phase, ShadowAssignment

UNHEARD_S = 5.0


def look(before: Seen | None, scene: Scene, now: float) -> Seen:
    return seen(before, scene.view, scene.record, now, UNHEARD_S)


def test_what_stays_as_it_is_was_first_seen_when_it_began() -> None:
    """Also while workers go on with their steps."""
    scene = Scene(2)
    first = look(None, scene, 1.0)
    scene.says("h0", Activity.TRAINING, rank=0, epoch=1, step=STEP + 1)
    later = look(first, scene, 9.0)

    assert first.since == 1.0
    assert later is first


def epoch(scene: Scene) -> None:
    membership = structs.replace(scene.record.membership, epoch=5)
    scene.record = structs.replace(scene.record, membership=membership)


def plan(scene: Scene) -> None:
    scene.record = structs.replace(scene.record, plan=values.plan(scene.record.membership))


def phase(scene: Scene) -> None:
    changed = structs.replace(scene.plan, phase=Phase.SYNC)
    scene.record = structs.replace(scene.record, plan=changed)


def stuck(scene: Scene) -> None:
    scene.says("h0", Activity.STUCK, rank=0, epoch=1, step=STEP)


@pytest.mark.parametrize("change", [epoch, plan, phase, stuck])
def test_anything_that_is_different_begins_anew(change: Callable[[Scene], None]) -> None:
    scene = Scene(2)
    if change is phase:
        scene.fails("h0")
    before = look(None, scene, 1.0)
    change(scene)
    after = look(before, scene, 9.0)
    back = look(after, scene, 12.0)

    assert after.since == 9.0
    assert back is after


def test_each_silence_has_a_time_of_its_own() -> None:
    """A host that misses a heartbeat now and then must not keep a deadline from passing."""
    scene = Scene(3)
    first = look(None, scene, 1.0)
    scene.silent.add("h1")
    one = look(first, scene, 4.0)
    scene.silent.add("h2")
    two = look(one, scene, 6.0)
    scene.silent.remove("h1")
    other = look(two, scene, 7.0)

    assert first.silences(3.0) == {}
    assert two.silences(9.0) == {values.worker("h1"): 5.0, values.worker("h2"): 3.0}
    assert other.silences(9.0) == {values.worker("h2"): 3.0}
    assert one.age(9.0) == two.age(9.0) == other.age(9.0) == 8.0


@pytest.mark.parametrize(("back_at", "counts_from"), [(4.9, 2.0), (5.0, 5.0 + LATE_S)])
def test_the_end_of_an_outage_excuses_those_that_fell_silent_with_it(
    back_at: float, counts_from: float
) -> None:
    """The hosts of a rack whose switch comes back report one after the other. Their heartbeats are
    out of phase by up to a second."""
    scene = Scene(3)
    scene.silent.add("h1")
    before = look(None, scene, 1.0)
    scene.silent.add("h2")
    away = look(before, scene, 2.0)
    scene.silent.remove("h1")
    after = look(away, scene, back_at)

    assert after.silences(30.0) == {values.worker("h2"): 30.0 - counts_from}


def test_each_end_of_the_same_outage_excuses_the_others_again() -> None:
    """Though less than ``unheard_s`` has passed since the first."""
    scene = Scene(3)
    scene.silent |= {"h0", "h1", "h2"}
    away = look(None, scene, 1.0)
    scene.silent.remove("h0")
    first = look(away, scene, 90.0)
    scene.silent.remove("h1")
    second = look(first, scene, 90.0 + UNHEARD_S / 2)

    assert second.silences(100.0) == {values.worker("h2"): 100.0 - (92.5 + LATE_S)}


def test_an_outage_of_the_store_takes_no_excuse_away() -> None:
    scene = Scene(3)
    scene.silent |= {"h1", "h2"}
    away = look(None, scene, 1.0)
    scene.silent.remove("h1")
    excused = look(away, scene, 90.0)
    after = look(after_outage(excused, 92.0, missed_s=1.0), scene, 92.0)

    assert after.silences(100.0) == {values.worker("h2"): 100.0 - (90.0 + LATE_S)}


def test_a_host_that_comes_and_goes_excuses_no_other() -> None:
    """In a large job one always does, and a dead host would never be replaced."""
    scene = Scene(3)
    scene.silent.add("h2")
    seen_last = look(None, scene, 1.0)
    for begin in range(20, 100, 8):
        scene.silent.add("h1")
        seen_last = look(seen_last, scene, begin)
        scene.silent.remove("h1")
        seen_last = look(seen_last, scene, begin + 7.0)

    assert seen_last.silences(100.0) == {values.worker("h2"): 99.0}


def test_a_standby_that_shadows_a_rank_may_fall_silent_too() -> None:
    scene = Scene(2)
    shadow = ShadowAssignment(member=values.member("s0"), rank=1, stay=True)
    scene.record = structs.replace(scene.record, shadows=(shadow,))

    assert look(None, scene, 1.0).silences(3.0) == {values.worker("s0"): 2.0}


def test_an_outage_is_no_silence_and_counts_for_no_deadline() -> None:
    """Right after Redis was away nobody may be taken for dead by the time before."""
    scene = Scene(2)
    scene.silent.add("h1")
    before = look(None, scene, 1.0)
    after = after_outage(before, 100.0, missed_s=90.0)
    again = look(after, scene, 100.0)

    assert before.age(10.0) == again.age(100.0) == 9.0
    assert again.silences(100.0) == {values.worker("h1"): 0.0}

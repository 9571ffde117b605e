"""What a deadline of a job is counted from: the moment at which anything of it was different."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from tests import values
from tests.core.clusters import STEP, Scene
from tmd.core.planning.deadlines import seen
from tmd.core.values.model import Activity, Phase


def test_what_stays_as_it_is_was_first_seen_when_it_began() -> None:
    """Also while workers go on with their steps."""
    scene = Scene(2)
    first = seen(None, scene.view, scene.record, 1.0)
    scene.says("h0", Activity.TRAINING, rank=0, epoch=1, step=STEP + 1)
    later = seen(first, scene.view, scene.record, 9.0)

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


def silence(scene: Scene) -> None:
    """Right after Redis was away nobody may be taken for dead by the time before."""
    scene.silent.add("h1")


@pytest.mark.parametrize("change", [epoch, plan, phase, stuck, silence])
def test_anything_that_is_different_begins_anew(change: Callable[[Scene], None]) -> None:
    scene = Scene(2)
    if change is phase:
        scene.fails("h0")
    before = seen(None, scene.view, scene.record, 1.0)
    change(scene)
    after = seen(before, scene.view, scene.record, 9.0)
    back = seen(after, scene.view, scene.record, 12.0)

    assert after.since == 9.0
    assert back is after

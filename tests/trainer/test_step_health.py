"""What is known of a step, in each of its states."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.fabric.circle import Circle, sync
from tests.fabric.circle import circle as of_size
from tmd.core.values.model import Activity
from tmd.fabric.unfinished_step import StepState
from tmd.trainer.worker.step_health import StepHealth

NEVER_COMMITS = set(Activity) - {Activity.TRAINING}


@pytest.fixture
def circle() -> Iterator[Circle]:
    with of_size(2) as made:
        made.group()
        made.allreduce()
        yield made


def health_of(circle: Circle, activity: Activity = Activity.TRAINING) -> StepHealth:
    return StepHealth(circle.fabrics[0], lambda: activity, lambda: None)


def test_a_step_that_nobody_can_finish_is_broken_with_its_epoch(circle: Circle) -> None:
    health, fabric = health_of(circle), circle.fabrics[0]
    fabric.step.begin(keeps=False)
    before = health.known_broken
    fabric.poison("a rank was lost")

    assert fabric.step.state is StepState.CLOSED
    assert (before, health.known_broken, health.broken) == (False, True, True)


def test_a_step_that_a_standby_may_finish_is_not_known_to_be_broken(circle: Circle) -> None:
    """Until it is given up. While it is suspended, the question that waits must not be asked."""
    health, fabric = health_of(circle), circle.fabrics[0]
    seen: list[tuple[StepState, bool]] = []

    def look() -> None:
        seen.append((fabric.step.state, health.known_broken))

    fabric.step.on_break = look
    fabric.step.begin(keeps=True)
    look()
    fabric.poison("a rank was lost")
    fabric.step.give_up()
    look()

    assert seen == [
        (StepState.OPEN, False),
        (StepState.SUSPENDED, False),
        (StepState.VOID, True),
    ]
    assert health.broken


@pytest.mark.parametrize("activity", sorted(NEVER_COMMITS))
def test_only_a_rank_that_trains_is_affected(circle: Circle, activity: Activity) -> None:
    fabric = circle.fabrics[0]
    fabric.poison("a rank was lost")

    assert not health_of(circle, activity).known_broken
    assert not health_of(circle, activity).broken


def test_what_a_broken_step_has_called_has_ended_after_it_settles(circle: Circle) -> None:
    """A healthy one does not wait: the other rank never calls the operation."""
    fabric = circle.fabrics[0]
    work = circle.of(fabric).allreduce([torch.ones(1000)], sync(asyncOp=True))
    health_of(circle).settle()
    before = work.is_completed()
    fabric.poison("a rank was lost")
    health_of(circle).settle()

    assert (before, work.is_completed()) == (False, True)

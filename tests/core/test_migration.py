"""The plan's table: every cell, and the result of a transition."""

from __future__ import annotations

import pytest
from msgspec import structs

from tmd.core.planning.migration import TABLE, PlanEvent, is_live, transition
from tmd.core.values.errors import IllegalTransition
from tmd.core.values.model import (
    FINAL,
    Mark,
    Member,
    Membership,
    MigrationPlan,
    Move,
    Phase,
    PlanKind,
)

A, B = (Member(f"w{i}", f"h{i}", f"h{i}:1") for i in range(2))
PLAN = MigrationPlan(
    id="p",
    kind=PlanKind.PLANNED,
    phase=Phase.PREPARE,
    moves=(Move(0, A, B),),
    old=Membership(1, (A,)),
    new=Membership(2, (B,)),
    cause="drain",
    reason="a test",
    timeline=(Mark(Phase.PREPARE, 1.0),),
)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", PlanEvent)
def test_every_cell_is_the_phase_it_names_or_an_error(phase: Phase, event: PlanEvent) -> None:
    """An illegal event raises, names plan, event and phase, and changes nothing."""
    plan = structs.replace(PLAN, phase=phase)
    expected = TABLE[phase].get(event)
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"plan p: '{event}' .* phase {phase}$"):
            transition(plan, event, 2.0)
        assert plan == structs.replace(PLAN, phase=phase)
        return
    after = transition(plan, event, 2.0, "so it goes")

    assert after.phase is expected
    assert after.outcome == "so it goes"
    assert after.timeline == (*plan.timeline, Mark(expected, 2.0))
    unchanged = {"phase": phase, "outcome": "", "timeline": plan.timeline}
    assert structs.replace(after, **unchanged) == plan


def test_every_phase_has_a_row_and_only_final_phases_are_dead_ends() -> None:
    """A plan always comes to an end."""
    assert set(TABLE) == set(Phase)
    assert {phase for phase, row in TABLE.items() if not row} == FINAL


def test_every_event_happens_in_some_phase() -> None:
    assert {event for row in TABLE.values() for event in row} == set(PlanEvent)


@pytest.mark.parametrize("phase", Phase)
def test_a_plan_is_live_until_its_phase_is_final(phase: Phase) -> None:
    assert is_live(structs.replace(PLAN, phase=phase)) is (phase not in FINAL)
    assert not is_live(None)

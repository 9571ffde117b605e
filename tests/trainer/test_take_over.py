"""A call of a source belongs to one directive."""

from __future__ import annotations

from msgspec import structs

from tmd.core.planning.directives import Prepare, Sync
from tmd.core.values.model import Member, Membership, Move
from tmd.trainer.protocol.take_over import state_purpose

FIRST, SECOND, JOINER = (Member(name, name, f"{name}:1") for name in ("a", "b", "c"))
NEW = Membership(2, (JOINER, FIRST, SECOND))


def sync(source: Member, rank: int = 0) -> Sync:
    return Sync("plan", NEW, rank, 7, (Move(0, FIRST, JOINER, source),))


def test_a_joiner_does_not_take_the_call_of_a_later_source() -> None:
    """The first source died. The second one calls while the joiner still waits for the first, and
    it calls only once."""
    assert state_purpose(sync(FIRST), 0) != state_purpose(sync(SECOND), 0)
    assert state_purpose(sync(FIRST), 0) != state_purpose(structs.replace(sync(FIRST), resume=8), 0)


def test_source_and_joiner_name_the_call_alike() -> None:
    """Their directives differ in their own ranks only."""
    assert state_purpose(sync(FIRST, rank=1), 0) == state_purpose(sync(FIRST, rank=0), 0)


def test_in_a_planned_move_the_joiner_knows_no_more_than_the_plan() -> None:
    assert state_purpose(Prepare("plan", NEW, 0, FIRST, 0), 0) == "state/plan/0"

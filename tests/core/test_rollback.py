"""Who gives whom a copy when all ranks go back to an earlier step."""

from __future__ import annotations

from msgspec import structs

from tests import values
from tests.core.clusters import STEP, Scene
from tmd.core.planning.rollback import Cast, cast_back, newest_of
from tmd.core.values.model import Member
from tmd.core.values.snapshots import Kept, Rollback


class Recovery:
    """Rank 1 is dead; what the others keep is said by ``copies``."""

    def __init__(self, **copies: tuple[Kept, ...]) -> None:
        self.scene = Scene(3, standbys=1)
        self.scene.fails("h1")
        for host in ("h0", "h2"):
            self.scene.halts(host, kept=copies.get(host, ()))
        self.owners = {0: values.member("h0"), 2: values.member("h2")}

    def cast(self, *spare: str, reached: int = STEP) -> tuple[Cast, Rollback | None]:
        candidates: list[Member] = [values.member(host) for host in spare]
        return cast_back(candidates, self.owners, 3, self.scene.facts, reached, self.scene.plan)


ALL_AT_4 = {"h0": (Kept(0, 4),), "h2": (Kept(2, 4), Kept(1, 4))}


def test_the_joiner_of_a_lost_rank_gets_the_copy_that_a_peer_keeps() -> None:
    recovery = Recovery(**ALL_AT_4)
    cast, back = recovery.cast("s0")

    assert newest_of(3, recovery.owners.values(), recovery.scene.facts) == 4
    assert back == Rollback(4, STEP - 4)
    assert cast == Cast({1: values.member("s0")}, {1: values.member("h2")})


def test_an_owner_that_lacks_its_own_copy_gets_one_like_a_joiner() -> None:
    """It has taken the rank over since the snapshot."""
    copies = (Kept(0, 4), Kept(1, 4), Kept(2, 4))
    cast, _ = Recovery(h0=copies).cast("s0")

    assert cast.joiners == {1: values.member("s0"), 2: values.member("h2")}
    assert cast.sources == {1: values.member("h0"), 2: values.member("h0")}


def test_without_a_standby_the_rank_stays_vacant_and_the_way_back_is_known() -> None:
    cast, back = Recovery(**ALL_AT_4).cast()

    assert cast == Cast(vacant=(1,))
    assert back == Rollback(4, STEP - 4)


def test_a_snapshot_of_some_ranks_is_no_way_back() -> None:
    """Named are the ranks of which there is no copy at all, and those of the dead."""
    cast, back = Recovery(h0=(Kept(0, 4),)).cast("s0")

    assert back is None
    assert cast == Cast(lost=(1, 2))


def test_copies_of_different_steps_are_no_snapshot() -> None:
    cast, back = Recovery(h0=(Kept(0, 4), Kept(2, 2)), h2=(Kept(1, 6),)).cast("s0")

    assert back is None
    assert cast.lost == (1,)


def test_the_newest_whole_one_is_taken() -> None:
    at_6 = {"h0": (Kept(0, 4), Kept(0, 6)), "h2": tuple(Kept(r, s) for r in (1, 2) for s in (4, 6))}
    _, back = Recovery(**at_6).cast("s0")

    assert back == Rollback(6, STEP - 6)


def test_what_was_ordered_before_counts_as_repeated() -> None:
    """Some may have gone back already, and say that they are at the earlier step."""
    recovery = Recovery(**ALL_AT_4)
    plan = structs.replace(recovery.scene.plan, rollback=Rollback(5, 4))
    recovery.scene.record = structs.replace(recovery.scene.record, plan=plan)
    _, back = recovery.cast("s0", reached=5)

    assert back == Rollback(4, 5)


def test_copies_of_ranks_that_do_not_exist_count_for_nothing() -> None:
    hostile = (Kept(-1, 4), Kept(3, 4), Kept(10**9, 4))
    cast, back = Recovery(h0=(*hostile, Kept(0, 4)), h2=hostile).cast("s0")

    assert back is None
    assert cast.lost == (1, 2)

"""The keepers of copies, and the step for a rollback: pure decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmd.core.values.snapshots import (
    EVERY,
    Kept,
    Rollback,
    is_due,
    keepers,
    newest_whole,
    wanted_every,
)

hosts = st.lists(st.sampled_from("abcde"), min_size=2, max_size=12)
copies = st.lists(st.builds(Kept, st.integers(0, 3), st.integers(0, 5)))


@given(hosts)
def test_the_loss_of_any_one_host_leaves_a_copy_of_every_rank(placed: list[str]) -> None:
    """Own copy or the keeper's, given at least two hosts."""
    found = keepers(placed)

    assert len(found) == len(placed)
    assert all(rank != keeper for rank, keeper in enumerate(found))
    if len(set(placed)) > 1:
        assert all(placed[rank] != placed[keeper] for rank, keeper in enumerate(found))


@given(st.integers(2, 6), st.integers(1, 4))
def test_on_equal_hosts_every_rank_keeps_copies_of_one_other(count: int, each: int) -> None:
    """Memory is spread evenly, whether ranks of a host are neighbours or not."""
    for placed in (
        [f"h{n // each}" for n in range(count * each)],
        [f"h{n % count}" for n in range(count * each)],
    ):
        assert sorted(keepers(placed)) == list(range(count * each))


def test_on_one_host_the_next_rank_keeps() -> None:
    """The loss of one worker costs no state."""
    assert keepers(["a", "a", "a"]) == (1, 2, 0)


@given(copies)
def test_the_newest_complete_step_has_every_rank_and_no_newer_one_has(found: list[Kept]) -> None:
    """Compared with the definition."""
    whole = {s for s in range(6) if all(Kept(r, s) in found for r in range(4))}

    assert newest_whole(4, [found]) == max(whole, default=None)


def test_two_copies_are_those_of_two_workers() -> None:
    """What one worker has twice goes with it."""
    own, of_both = (Kept(0, 3), Kept(1, 2)), (Kept(0, 2), Kept(1, 2), Kept(1, 3))

    assert newest_whole(2, [(*own, *own), of_both]) == 3
    assert newest_whole(2, [(*own, *own), of_both], copies=2) is None
    assert newest_whole(2, [(*own, Kept(0, 2)), of_both], copies=2) == 2


@given(st.integers(0, 100))
def test_whether_a_snapshot_is_due_is_equal_on_all_ranks(step: int) -> None:
    """The first step with other keepers is always due; without snapshots none is."""
    assert is_due(step, 10, fresh=True)
    assert is_due(step, 10, fresh=False) == (step % 10 == 0)
    assert not is_due(step, 0, fresh=True)


def test_snapshots_are_taken_by_default_for_a_unique_state() -> None:
    """Replicas need none; a script may say otherwise; a single rank has no keeper."""
    alike, mixed = [(0, 1, 2)], [(0, 1), (2,)]

    assert wanted_every(None, alike, 3) == 0
    assert wanted_every(None, mixed, 3) == EVERY
    assert wanted_every(5, alike, 3) == 5
    assert wanted_every(0, mixed, 3) == 0
    assert wanted_every(5, [(0,)], 1) == 0
    with pytest.raises(ValueError, match="snapshots=-1"):
        wanted_every(-1, mixed, 3)


def test_a_rollback_states_its_cost() -> None:
    """In a sentence for people."""
    assert Rollback(20, 7).sentence == "rolled back to step 20, 7 steps are repeated"
    assert Rollback(20, 1).sentence == "rolled back to step 20, 1 step is repeated"

"""Names of checkpoints: which are complete, which may be removed, and what is reported."""

from hypothesis import given
from hypothesis import strategies as st

from tmd.core.values.checkpoints import (
    PARTIAL,
    REFUSED,
    MissedCheckpoint,
    SavedCheckpoint,
    advice,
    complete,
    is_due,
    missed_too,
    name_of,
    step_of,
    still_missed,
    unneeded,
)


def test_only_a_final_name_is_taken_for_a_checkpoint() -> None:
    """Incomplete, refused and foreign folders do not count."""
    names = [name_of(30), name_of(7), name_of(40) + PARTIAL, name_of(50) + REFUSED, "step-8", "x"]

    assert complete(names) == [30, 7]
    assert step_of(f"{name_of(3)}.gone") is None


def test_a_call_begins_without_a_checkpoint_unless_its_end_was_due() -> None:
    """The end of a call counts as a step, but no job can resume there."""
    assert [s for s in range(1, 25) if is_due(s, 10, first=False)] == [10, 20]
    assert is_due(11, 10, first=True)
    assert not is_due(1, 10, first=True)


@given(
    steps=st.sets(st.integers(1, 90)),
    halves=st.sets(st.integers(1, 90)),
    refused=st.sets(st.integers(1, 90)),
    keep=st.integers(1, 4),
    before=st.integers(0, 99),
)
def test_the_newest_always_stay(
    steps: set[int], halves: set[int], refused: set[int], keep: int, before: int
) -> None:
    """The checkpoint that is being written stays, too."""
    names = [*map(name_of, steps)]
    names += [name_of(s) + PARTIAL for s in halves] + [name_of(s) + REFUSED for s in refused]

    gone = set(unneeded(names, keep, partial_before=before))

    stay = set(complete(set(names) - gone))
    assert stay == set(sorted(steps)[-keep:])
    assert {name_of(s) + PARTIAL for s in halves if s >= before}.isdisjoint(gone)
    assert {name_of(s) + REFUSED for s in refused if s >= min(stay, default=0)}.isdisjoint(gone)


def test_the_advice_names_the_newest_known_checkpoint() -> None:
    """Without any checkpoint the advice names the remedy."""
    old, new = (
        SavedCheckpoint(10, 5.0, "/c/step-00000010"),
        SavedCheckpoint(20, 4.0, "/c/step-00000020"),
    )

    assert "from step 20 (/c/step-00000020)" in advice([old, None, new])
    assert "tmd launch" in advice([new])
    assert advice([None]) == "start the job again from its newest checkpoint"


def test_a_later_complete_checkpoint_ends_a_miss() -> None:
    """An earlier one that completes late does not end it."""
    first = missed_too(None, 10, "no space")
    second = missed_too(first, 20, "x" * 1000)

    assert (first, second.count) == (MissedCheckpoint(10, "no space", 1), 2)
    assert len(second.reason) < 300
    assert still_missed(second, SavedCheckpoint(10, 0.0, "c")) == second
    assert still_missed(second, SavedCheckpoint(30, 0.0, "c")) is None
    assert still_missed(None, SavedCheckpoint(30, 0.0, "c")) is None

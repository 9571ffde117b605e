"""Whether a broken step is finished, and with which operations it goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmd.core.worker.broken_step import Place, Progress, reruns


def place(step: int = 7, between: int = 0, **groups: tuple[int, int]) -> Place:
    """``groups``: (done, kept) of each; no operation has begun that is not complete."""
    progress = {name: Progress(done, kept, done) for name, (done, kept) in groups.items()}
    return Place(step, progress, between=between)


def afresh(between: int = 0) -> Place:
    return Place(7, {"a": Progress()}, afresh=True, between=between)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        # Operations count from 0. Nobody has completed operation 3.
        ([place(a=(3, 1)), place(a=(3, 2)), place(a=(3, 3))], {"a": 3}),
        # One rank lacks operation 2, and the others can run it again.
        ([place(a=(3, 1)), place(a=(2, 0)), place(a=(3, 2))], {"a": 2}),
        # One of them cannot.
        ([place(a=(3, 3)), place(a=(2, 0))], None),
        # A rank has done nothing yet: all must have kept everything.
        ([place(a=(2, 0)), place(a=(0, 0))], {"a": 0}),
        ([place(a=(2, 1)), place(a=(0, 0))], None),
        # A rank has sent a message in this step.
        ([place(a=(2, -1)), place(a=(2, 1))], None),
        # Groups are judged one by one, the step as a whole.
        ([place(a=(1, 0), b=(4, 4)), place(a=(1, 1), c=(9, 8))], {"a": 1, "b": 4, "c": 9}),
        ([place(a=(1, 0), b=(4, 4)), place(a=(1, 1), b=(2, 2))], None),
        # A rank has not begun the step, and no script calls operations before it.
        ([place(a=(2, 0)), afresh()], {"a": 0}),
        ([place(a=(2, 1)), afresh()], None),
        # Scripts call operations before the step: one rank calls them, the others are past them.
        ([place(a=(2, 0)), afresh(between=1)], None),
        ([place(between=1, a=(2, 0)), afresh()], None),
        ([place(between=1, a=(2, 0)), place(between=1, a=(2, 0))], {"a": 2}),
        # Another step, and a job without groups.
        ([place(7, a=(1, 0)), place(8, a=(1, 0))], None),
        ([place(), place()], {}),
    ],
)
def test_the_decision(places: list[Place], expected: dict[str, int] | None) -> None:
    """The first operation that a rank lacks, if all can run it and those after it again."""
    found = reruns(places)
    firsts = None if found is None else {name: again.first for name, again in found.items()}
    assert firsts == expected


def test_operations_that_no_rank_has_begun_are_new_to_all() -> None:
    """One rank has completed operation 2, another one has begun it, a third one has not."""
    found = reruns(
        [Place(7, {"a": Progress(done, 0, begun)}) for done, begun in [(3, 3), (2, 3), (2, 2)]]
    )
    assert found == {"a": (2, 3)}


PROGRESS = st.builds(
    lambda done, kept, more: Progress(done, min(kept, done), done + more),
    *(st.integers(0, 5), st.integers(-1, 5), st.integers(0, 1)),
)
PLACES = st.lists(
    st.one_of(
        st.builds(
            Place,
            st.sampled_from((7, 7, 7, 8)),
            st.dictionaries(st.sampled_from("abc"), PROGRESS),
            between=st.sampled_from((0, 0, 0, 1)),
        ),
        st.just(afresh()),
    ),
    min_size=1,
)


@given(PLACES, st.randoms())
def test_every_rank_decides_alike_and_can_do_it(places: list[Place], random: object) -> None:
    """In whatever order the places are known. No rank lacks what it has to run again."""
    shuffled = list(places)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    found = reruns(places)

    assert found == reruns(shuffled)
    if found is None:
        return
    assert len({each.step for each in places}) == 1
    for each in places:
        for name, progress in each.groups.items():
            again = found[name]
            assert 0 <= progress.kept <= again.first <= progress.done
            assert again.first <= again.until
            assert progress.begun <= again.until

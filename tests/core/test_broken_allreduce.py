"""How ranks complete an all-reduce of which each still has something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmd.core.worker.broken_allreduce import (
    Addition,
    Holding,
    PartialSum,
    Piece,
    SumOrder,
    pieces,
)
from tmd.fabric.collectives.halving import sum_order

PAIR: SumOrder = (0, 1)
FOUR: SumOrder = ((0, 1), (2, 3))
INPUTS = Holding()


def summed(ranks: int, start: int = 0, stop: int = 8) -> Holding:
    return Holding(sums=(PartialSum(start, stop, ranks),))


@pytest.mark.parametrize(
    ("holdings", "expected"),
    [
        # Nobody has any result: all is reduced from the inputs.
        ([INPUTS, INPUTS], [Piece(0, 8, None)]),
        # A part is final on one rank.
        ([Holding(((2, 4),)), INPUTS], [Piece(0, 2, None), Piece(2, 4, 0), Piece(4, 8, None)]),
        # One part is final on all ranks.
        ([Holding(((0, 4),)), Holding(((0, 4),))], [Piece(4, 8, None)]),
        # One rank has completed it, and the script has changed nothing.
        ([Holding(((0, 8),), inputs=False), INPUTS], [Piece(0, 8, 0)]),
        # The script has changed a part, which another rank still has.
        (
            [Holding(((0, 4),), inputs=False), Holding(((4, 8),))],
            [Piece(0, 4, 0), Piece(4, 8, 1)],
        ),
        # Nobody has the result of 4 to 8, and one rank has lost its inputs.
        ([Holding(((0, 4),), inputs=False), INPUTS], None),
    ],
)
def test_results_are_given_and_inputs_reduced(
    holdings: list[Holding], expected: list[Piece] | None
) -> None:
    """What a rank has is sent; everything else is reduced, if all have their inputs."""
    assert pieces(holdings, 8, PAIR) == expected


@pytest.mark.parametrize(
    ("holdings", "source", "additions"),
    [
        # Rank 0 has 0 + 1. The other two add their inputs, and then both sums are added.
        ([summed(2), INPUTS, INPUTS, INPUTS], 0, [(3, 2), (2, 0)]),
        # The sum is on rank 1.
        ([INPUTS, summed(2), INPUTS, INPUTS], 1, [(3, 2), (2, 1)]),
        # Both pairs have added theirs.
        ([summed(2), INPUTS, INPUTS, summed(2)], 0, [(3, 0)]),
    ],
)
def test_sums_are_added_in_the_order_of_an_undisturbed_operation(
    holdings: list[Holding], source: int, additions: list[tuple[int, int]]
) -> None:
    """In any other one, bits would differ."""
    found = pieces(holdings, 8, FOUR)
    assert found == [Piece(0, 8, source, tuple(Addition(*each) for each in additions))]


def test_a_later_sum_replaces_an_earlier_one() -> None:
    """Rank 0 has added rank 1 everywhere, and ranks 2 and 3 in one half."""
    sums = PartialSum(0, 8, 2), PartialSum(0, 4, 4)
    found = pieces([Holding(sums=sums), *[INPUTS] * 4], 8, (FOUR, 4))
    assert found == [
        Piece(0, 4, 0, (Addition(4, 0),)),
        Piece(4, 8, 0, (Addition(3, 2), Addition(2, 0), Addition(4, 0))),
    ]


def test_a_sum_whose_ranks_are_unknown_is_not_used() -> None:
    """No three of these ranks are ever summed. So nothing is known of the rank's input, either."""
    assert pieces([summed(3), INPUTS, INPUTS, INPUTS], 8, FOUR) is None


def test_a_result_that_a_script_has_changed_is_not_computed_again() -> None:
    """Rank 0 has completed it, and its input is in the sum of rank 1. The standby that has replaced
    another rank may compute another input."""
    assert pieces([Holding(inputs=False), summed(2), INPUTS, INPUTS], 8, FOUR) is None


SPANS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), max_size=3).map(
    lambda found: tuple((start, start + length) for start, length in found)
)
HOLDINGS = st.lists(st.builds(Holding, SPANS, inputs=st.booleans()), min_size=2, max_size=4)


@given(HOLDINGS)
def test_every_element_comes_from_where_it_is(holdings: list[Holding]) -> None:
    """Each at most once, from a rank that has it, or from the inputs of all ranks."""
    found = pieces(holdings, 9, sum_order(len(holdings)))
    nowhere = False
    for element in range(9):
        final = [any(a <= element < b for a, b in each.final) for each in holdings]
        reducible = all(each.inputs for each in holdings)
        nowhere |= not any(final) and not reducible
        if found is None:
            continue
        covering = [piece for piece in found if piece.start <= element < piece.stop]
        assert len(covering) == (0 if all(final) else 1)
        for piece in covering:
            source = piece.source
            assert final[source] if source is not None else reducible and not any(final)
            assert not piece.additions
    assert (found is None) == nowhere


def nodes(tree: SumOrder) -> list[SumOrder]:
    """``tree`` and all sums in it."""
    below = [] if isinstance(tree, int) else [each for part in tree for each in nodes(part)]
    return [tree, *below]


def ranks(tree: SumOrder) -> list[int]:
    return [each for each in nodes(tree) if isinstance(each, int)]


@given(st.integers(2, 12), st.data())
def test_whatever_sums_the_ranks_have_the_whole_is_computed_in_order(
    size: int, data: st.DataObject
) -> None:
    """A rank has a sum that contains its own input, or that input. Nothing more is needed."""
    tree = sum_order(size)
    assert sorted(ranks(tree)) == list(range(size))
    have: list[SumOrder] = [
        data.draw(st.sampled_from([n for n in nodes(tree) if n != tree and rank in ranks(n)]))
        for rank in range(size)
    ]
    counts = [len(ranks(each)) for each in have]
    holdings = [summed(count) if count > 1 else INPUTS for count in counts]

    found = pieces(holdings, 8, tree)

    assert found is not None
    (piece,) = found
    if piece.source is None:
        assert counts == [1] * size
        return
    for giver, taker in piece.additions:
        have[taker] = (have[taker], have[giver])
    assert have[piece.source] == tree


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, 0),
        (2, (0, 1)),
        (3, ((0, 2), 1)),
        (4, ((0, 1), (2, 3))),
        (6, (((0, 4), (1, 5)), (2, 3))),
    ],
)
def test_ranks_beyond_a_power_of_two_are_added_first(size: int, expected: SumOrder) -> None:
    """To the rank into which they fold."""
    assert sum_order(size) == expected

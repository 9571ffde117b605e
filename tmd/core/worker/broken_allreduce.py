"""Decides how an all-reduce that broke is completed from what each rank still has of it.

A rank has the result of some elements, the sum of its own input and those of some other ranks in
other elements, and its input in all others. The ranks tell each other which elements are which, and
all compute the same decision from that. Until a rank has completed the operation, its input is not
lost: an overwritten element holds a sum that contains it. So the result can be computed whichever
ranks are replaced by standbys, which have all their inputs.

"Sum" stands for whatever the reduction computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

Span = tuple[int, int]
"""Consecutive elements of a tensor: the index of the first, and the index after the last."""

SumOrder = int | tuple["SumOrder", "SumOrder"]
"""The order in which the ranks' inputs are summed: a rank, or two sums of which the first is the
left operand. ``((0, 1), (2, 3))`` stands for ``(0 + 1) + (2 + 3)``."""


class PartialSum(NamedTuple):
    """Elements in which a rank has the sum of several ranks' inputs instead of its own input."""

    start: int
    stop: int
    ranks: int
    """How many ranks. Which ones follows from the :data:`SumOrder`."""


class Holding(Struct, frozen=True):
    """What a rank has of the tensor of an all-reduce that is not complete on all ranks."""

    final: tuple[Span, ...] = ()
    """Elements of the result that it can give."""
    sums: tuple[PartialSum, ...] = ()
    """In the order in which they were computed: a later one replaces an earlier one."""
    inputs: bool = True
    """Whether it still has its inputs in the elements that are in neither list. If not, it has
    nothing there."""

    def has(self, start: int, stop: int) -> bool:
        """Whether it has the result of all these elements in one span."""
        return any(first <= start and stop <= last for first, last in self.final)


class Addition(NamedTuple):
    """Rank ``giver`` sends its sum to rank ``taker``, which adds it to its own, on the right."""

    giver: int
    taker: int


class Piece(NamedTuple):
    """Elements that all ranks get in the same way."""

    start: int
    stop: int
    source: int | None
    """The rank that gives them to all others. ``None``: all ranks have their inputs, and reduce
    them."""
    additions: tuple[Addition, ...] = ()
    """How ``source`` gets the sum, step by step. Empty if it has the result."""


def pieces(holdings: Sequence[Holding], length: int, order: SumOrder) -> list[Piece] | None:
    """How ranks with these ``holdings`` get the whole result, of ``length`` elements. Elements
    whose result all ranks have are left out.

    ``None`` if no rank has the result of some elements, and either a rank has neither an input nor
    a sum there (its script has used the result and overwritten it), or the sums cannot be combined
    in ``order``. In the first case the others might compute them again, but a standby may have
    other inputs than its rank had. The result would then differ from the one that was used.
    """
    bounds = {0, length}
    for each in holdings:
        bounds.update(bound for span in each.final for bound in span)
        bounds.update(bound for part in each.sums for bound in part[:2])
    cuts, size = sorted(bounds), len(holdings)
    columns = zip(*(_summed(each, cuts, size) for each in holdings), strict=True)
    tree, found = _tree(order), []
    for (start, stop), summed in zip(pairwise(cuts), columns, strict=True):
        if size in summed:
            if not all(count == size for count in summed):
                found.append(Piece(start, stop, summed.index(size)))
        elif 0 in summed:
            return None
        elif all(count == 1 for count in summed):
            found.append(Piece(start, stop, None))
        else:
            total = _total(tree, summed)
            if total is None:
                return None
            found.append(Piece(start, stop, total.rank, total.additions))
    return found


def _summed(holding: Holding, cuts: Sequence[int], size: int) -> list[int]:
    """For each span between two ``cuts``, how many ranks' inputs are in what this rank has there:
    ``size`` in the result, 1 in its own input, 0 if it has nothing."""
    at = {cut: number for number, cut in enumerate(cuts)}
    counts = [1 if holding.inputs else 0] * (len(cuts) - 1)
    for start, stop, ranks in (*holding.sums, *((*span, size) for span in holding.final)):
        counts[at[start] : at[stop]] = [ranks] * (at[stop] - at[start])
    return counts


class _Node(NamedTuple):
    """A sum: of one rank, or of two sums."""

    ranks: tuple[int, ...]
    sums: tuple[_Node, ...] = ()


def _tree(order: SumOrder) -> _Node:
    if isinstance(order, int):
        return _Node((order,))
    left, right = (_tree(each) for each in order)
    return _Node((*left.ranks, *right.ranks), (left, right))


class _Total(NamedTuple):
    """``rank`` has a sum once all ``additions`` are made."""

    rank: int
    additions: tuple[Addition, ...] = ()


def _total(node: _Node, summed: Sequence[int]) -> _Total | None:
    """Where the sum of ``node`` can be had; ``None`` if it cannot be computed. ``summed``: for each
    rank, how many ranks' inputs its sum has."""
    for rank in node.ranks:
        if summed[rank] == len(node.ranks):
            return _Total(rank)
    found = [_total(each, summed) for each in node.sums]
    if not found or None in found:
        return None
    left, right = (each for each in found if each is not None)
    last = Addition(giver=right.rank, taker=left.rank)
    return _Total(left.rank, (*left.additions, *right.additions, last))

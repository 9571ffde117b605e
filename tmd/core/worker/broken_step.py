"""Decides whether a step in which a rank was lost can be finished, or has to be repeated.

All members of the new epoch, the hot standby in the lost rank's place among them, exchange how far
each has come in the operations of each group. Every one of them computes the same decision from it.
A large all-reduce is finished from the inputs and results that the ranks still have. For each one
they exchange what that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct


class Progress(Struct, frozen=True):
    """How far a rank has come in the operations of a group in its present step."""

    done: int = 0
    kept: int = 0
    """The first operation that it can run again; -1 for none, since not all were collectives."""
    begun: int = 0
    """Operations that it has begun."""


class Place(Struct, frozen=True):
    """Where a rank is after a loss."""

    step: int
    groups: Mapping[str, Progress] = {}
    afresh: bool = False
    """It has not begun ``step``, or begins it again."""
    between: int = 0
    """Operations that its script has called since the previous vote, without those of ``step``."""


class Rerun(NamedTuple):
    """The operations of a group with which a broken step goes on."""

    first: int = 0
    """The first one that not all ranks have completed: a rank that has completed it runs it once
    more, for the others."""
    until: int = 0
    """The first one that no rank has begun."""


def first_operations(places: Sequence[Place]) -> dict[str, Rerun] | None:
    """By group, the operations that its ranks run in the new epoch.

    ``None`` if the step has to be repeated: a rank cannot run such an operation again, or the ranks
    are not in the same step, or a rank begins it afresh whose script calls operations before it.
    Those the others have behind them.
    """
    if len({place.step for place in places}) > 1:
        return None
    if any(place.afresh for place in places) and any(place.between for place in places):
        return None
    found: dict[str, Rerun] = {}
    names = dict.fromkeys(name for place in places for name in place.groups)
    for name in names:
        ranks = [place.groups[name] for place in places if name in place.groups]
        first = min(rank.done for rank in ranks)
        if any(rank.kept < 0 or rank.kept > first for rank in ranks):
            return None
        found[name] = Rerun(first, max(rank.begun for rank in ranks))
    return found


Span = tuple[int, int]
"""Consecutive elements of a tensor, from the first to before the second."""


class Holding(Struct, frozen=True):
    """What a rank has of the tensor of an all-reduce that is not complete on all ranks."""

    final: tuple[Span, ...] = ()
    """Elements of the result that it can give."""
    lost: tuple[Span, ...] = ()
    """Elements of which it has neither input nor result."""
    inputs: bool = True
    """Whether it has its inputs of the elements that are in neither list. If not, those are lost,
    too."""

    def has(self, start: int, stop: int) -> bool:
        """Whether it has the result of these elements. No span begins or ends among them."""
        return _within((start, stop), self.final)

    def can_reduce(self, start: int, stop: int) -> bool:
        """Whether it has the inputs of these elements, of whose result it has nothing."""
        return self.inputs and not _within((start, stop), self.lost)


class Piece(NamedTuple):
    """Elements that all ranks get in the same way."""

    start: int
    stop: int
    source: int | None
    """The rank that gives them; ``None``: they are reduced from the inputs."""


def pieces(holdings: Sequence[Holding], length: int) -> list[Piece] | None:
    """How ranks with these ``holdings`` get the whole result, of ``length`` elements.

    ``None`` if that is impossible: some element can be neither given nor reduced.
    """
    bounds = {0, length}
    for each in holdings:
        bounds.update(bound for span in (*each.final, *each.lost) for bound in span)
    found = []
    for start, stop in pairwise(sorted(bounds)):
        sources = [rank for rank, each in enumerate(holdings) if each.has(start, stop)]
        if not sources and not all(each.can_reduce(start, stop) for each in holdings):
            return None
        found.append(Piece(start, stop, sources[0] if sources else None))
    return found


def _within(span: Span, spans: Sequence[Span]) -> bool:
    return any(start <= span[0] and span[1] <= stop for start, stop in spans)

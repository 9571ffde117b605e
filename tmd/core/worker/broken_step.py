"""Decides whether a step in which a rank was lost can be finished, or has to be repeated.

All members of the new epoch, the hot standby in the lost rank's place among them, exchange how far
each has come in the operations of each group. Every one of them computes the same decision from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct


class Progress(Struct, frozen=True):
    """How far a rank has come in the operations of a group in its present step."""

    done: int = 0
    kept: int = 0
    """The first operation that it can run again; -1 for none, since not all were collectives."""


class Place(Struct, frozen=True):
    """Where a rank is after a loss."""

    step: int
    groups: Mapping[str, Progress] = {}
    afresh: bool = False
    """It has not begun ``step``, or begins it again."""
    between: int = 0
    """Operations that its script has called since the previous vote, without those of ``step``."""


def first_operations(places: Sequence[Place]) -> dict[str, int] | None:
    """By group, the number of the first operation that its ranks run in the new epoch.

    That is the first one that not all of them have completed: a rank that has completed it runs it
    once more, for the others. ``None`` if the step has to be repeated: a rank cannot run such an
    operation again, or the ranks are not in the same step, or a rank begins it afresh whose script
    calls operations before it. Those the others have behind them.
    """
    if len({place.step for place in places}) > 1:
        return None
    if any(place.afresh for place in places) and any(place.between for place in places):
        return None
    found: dict[str, int] = {}
    names = dict.fromkeys(name for place in places for name in place.groups)
    for name in names:
        ranks = [place.groups[name] for place in places if name in place.groups]
        first = min(rank.done for rank in ranks)
        if any(rank.kept < 0 or rank.kept > first for rank in ranks):
            return None
        found[name] = first
    return found

"""Decides whether a step in which a rank was lost can be finished, or has to be repeated.

All members of the new epoch, including the hot standby that replaces the lost rank, exchange how
many operations of each group they have completed. All of them compute the same decision from that.
A large all-reduce is finished from what the ranks still have of it
(:mod:`tmd.core.worker.broken_allreduce`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct


class Progress(Struct, frozen=True):
    """How far a rank has come in the operations of a group in its current step."""

    done: int = 0
    """Operations that it has completed."""
    kept: int = 0
    """Number of the first operation that it can run again. -1: some operation of this step cannot
    be run again, and so the step cannot be finished."""
    begun: int = 0
    """Operations that it has begun."""


class Place(Struct, frozen=True):
    """Where a rank is after a loss."""

    step: int
    groups: Mapping[str, Progress] = {}
    afresh: bool = False
    """It has not begun ``step``, or begins it again."""
    between: int = 0
    """Operations that its script has called since the previous vote, not counting those of
    ``step``."""


class Rerun(NamedTuple):
    """Where a broken step goes on, in the operations of one group."""

    first: int = 0
    """The first one that not all ranks have completed: a rank that has completed it runs it once
    more, for the others."""
    until: int = 0
    """The first one that no rank has begun."""


def reruns(places: Sequence[Place]) -> dict[str, Rerun] | None:
    """By group, the operations that its ranks run in the new epoch.

    ``None`` if the step has to be repeated: the ranks are not in the same step, or a rank cannot
    run an operation again that another one lacks, or a rank begins the step afresh and scripts
    call operations between the previous vote and the step. That rank would call these again, and
    the other ranks would not.
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

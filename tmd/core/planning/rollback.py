"""Rolls back after a loss: chooses the source of each rank's copy of the newest snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tmd.core.planning.migration import PlanFacts
from tmd.core.planning.standbys import assigned
from tmd.core.values.model import Member, MigrationPlan
from tmd.core.values.snapshots import Kept, Rollback, newest_whole


class Cast(NamedTuple):
    """The joiners of ranks that no survivor claims, and the sources of their state."""

    joiners: dict[int, Member] = {}
    sources: dict[int, Member | None] = {}
    """``None``: the joiner has the state itself."""
    lost: tuple[int, ...] = ()
    """Ranks whose state no worker has."""
    vacant: tuple[int, ...] = ()
    """Ranks for which there is no standby."""
    missing: str = ""
    """Another fact that must be waited for."""


def newest_of(size: int, owners: Iterable[Member], facts: PlanFacts) -> int | None:
    """The newest snapshot that is complete in the memory of ``owners``."""
    return newest_whole(size, (facts.status[m.worker].kept for m in owners))


def cast_back(
    spare: Sequence[Member],
    owners: dict[int, Member],
    size: int,
    facts: PlanFacts,
    reached: int,
    plan: MigrationPlan,
) -> tuple[Cast, Rollback | None]:
    """How all ranks return to the newest complete snapshot, or the ranks that are lost without one.

    An owner that lacks its own copy (it has assumed the rank since) gets one like a joiner.
    Some workers may already have carried out an earlier order of ``plan``.
    """
    ordered = plan.rollback
    vacant = [rank for rank in range(size) if rank not in owners]
    step = newest_of(size, owners.values(), facts)
    if step is None:
        here = {c.rank for m in owners.values() for c in facts.status[m.worker].kept}
        return Cast(lost=tuple(r for r in range(size) if r in vacant or r not in here)), None
    most = reached if ordered is None else max(reached, ordered.step + ordered.repeats)
    back = Rollback(step, most - step)
    found = assigned(vacant, spare, facts, late=plan.late)
    if open_ranks := tuple(rank for rank in vacant if rank not in found):
        return Cast(vacant=open_ranks), back
    lacking = [r for r, m in owners.items() if Kept(r, step) not in facts.status[m.worker].kept]
    sources = {
        rank: next(m for m in owners.values() if Kept(rank, step) in facts.status[m.worker].kept)
        for rank in (*vacant, *lacking)
    }
    joiners = {**found, **{rank: owners[rank] for rank in lacking}}
    return Cast(joiners, dict(sources)), back

"""Losses while joiners copy the state of lost ranks: who must halt, and who is named dead, too."""

from __future__ import annotations

from collections.abc import Collection

from tmd.core.planning.migration import PlanFacts
from tmd.core.planning.rollback import newest_of
from tmd.core.values.model import JobRecord, Member, MigrationPlan


def witnesses(
    plan: MigrationPlan, facts: PlanFacts, rejected: Collection[str]
) -> tuple[Member, ...]:
    """Those of ``plan`` once it goes back to RECOVER: a joiner that has a state must halt as well.
    Any other one is of the pool again, and is not waited for."""
    has = [
        move.joiner
        for move in plan.moves
        if move.joiner is not None
        and move.joiner.worker not in rejected
        and (move.source is None or facts.synced(move.joiner.worker, plan))
    ]
    return tuple(dict.fromkeys((*plan.witnesses, *has)))


def silent_survivors(record: JobRecord, plan: MigrationPlan, facts: PlanFacts) -> tuple[str, ...]:
    """Members of the new epoch that take no new rank and of which nothing is heard.

    None if the job could not go on without them. A silent host proves nothing: its worker may be
    well, and just send the only copy of a state.
    """
    joiners = {move.joiner for move in plan.moves}
    members = [m for m in dict.fromkeys(plan.new.members) if m not in joiners]
    silent = [w for m in members if not facts.has_ended(w := m.worker) and w not in facts.status]
    return tuple(silent) if silent and _has_all_states(record, plan, facts) else ()


def _has_all_states(record: JobRecord, plan: MigrationPlan, facts: PlanFacts) -> bool:
    """Whether workers that are heard have the state of each rank, or a snapshot of all."""
    copying = {move.joiner for move in plan.moves if move.source is not None}
    holders = [
        m
        for m in dict.fromkeys(plan.new.members)
        if m.worker in facts.status and (m not in copying or facts.synced(m.worker, plan))
    ]
    if newest_of(record.world_size, holders, facts) is not None:
        return True
    alike = {rank for m in holders for rank in facts.status[m.worker].replicas}
    missing = (rank for rank, m in enumerate(plan.new.members) if m not in holders)
    return plan.rollback is None and alike.issuperset(missing)

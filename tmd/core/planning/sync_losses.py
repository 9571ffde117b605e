"""Handles losses while joiners copy the state of lost ranks: which workers must halt, and which
silent ones are named dead as well."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import structs

from tmd.core.planning.failover import open_failover, settle
from tmd.core.planning.migration import PlanFacts
from tmd.core.planning.standbys import candidates
from tmd.core.values.model import (
    Activity,
    ClusterView,
    HostStatus,
    JobRecord,
    Member,
    MigrationPlan,
    Phase,
)


def witnesses(
    plan: MigrationPlan, facts: PlanFacts, rejected: Collection[str]
) -> tuple[Member, ...]:
    """Witnesses of ``plan`` once it goes back to RECOVER. A joiner that has a state must halt as
    well. Any other joiner returns to the pool, and nothing waits for it."""
    has = [
        move.joiner
        for move in plan.moves
        if move.joiner is not None
        and move.joiner.worker not in rejected
        and (move.source is None or facts.synced(move.joiner.worker, plan))
    ]
    return tuple(dict.fromkeys((*plan.witnesses, *has)))


def silent_survivors(
    record: JobRecord, plan: MigrationPlan, view: ClusterView, facts: PlanFacts
) -> tuple[str, ...]:
    """Members of the new epoch that take no new rank and of which nothing is heard.

    Empty if the job could not go on without them, for lack of a state or of a standby. A silent
    host proves nothing: its worker may be well, and may be sending the only copy of a state.
    """
    joiners = {move.joiner for move in plan.moves}
    members = [m.worker for m in dict.fromkeys(plan.new.members) if m not in joiners]
    silent = tuple(w for w in members if w not in facts.status and not facts.has_ended(w))
    return silent if silent and _goes_on_without(silent, record, plan, view) else ()


def _goes_on_without(
    silent: Sequence[str], record: JobRecord, plan: MigrationPlan, view: ClusterView
) -> bool:
    """Whether all ranks would have a holder with a state once all others have halted."""
    without = open_failover(record, silent, "", "", "", 0.0)
    hosts = tuple(_halted(host, plan) for host in view.hosts)
    later = structs.replace(view, hosts=hosts)
    facts = PlanFacts(later, record.job)
    assert without.plan is not None
    spare = candidates(later, without, facts)
    settled, missing = settle(without, without.plan, facts, spare, 0.0)
    found = settled.plan
    return not missing and found is not None and found.phase is Phase.SYNC


def _halted(host: HostStatus, plan: MigrationPlan) -> HostStatus:
    """``host`` once its workers that are ready to go on by ``plan`` have halted again."""
    workers = tuple(
        structs.replace(w, activity=Activity.STUCK)
        if w.activity is Activity.SYNCED and w.plan == plan.id
        else w
        for w in host.workers
    )
    return host if workers == host.workers else structs.replace(host, workers=workers)

"""From whom a joiner learns the state of its rank in a planned move."""

from __future__ import annotations

from tmd.core.findings import GRAVE
from tmd.core.migration import Facts
from tmd.core.model import ClusterView, JobRecord, Member


def source_of(
    record: JobRecord, view: ClusterView, facts: Facts, rank: int, leaver: Member
) -> Member:
    """From whom the joiner learns the rank: the leaver, or a replica if its host is not sound."""
    if not _ails(view, leaver.host):
        return leaver
    members = enumerate(record.membership.members)
    replicas = [
        m
        for r, m in members
        if r != rank and r in facts.status[leaver.worker].replicas and not _ails(view, m.host)
    ]
    # Rank 0 last: it is there that scripts print and save.
    return next(reversed(replicas), leaver)


def _ails(view: ClusterView, name: str) -> bool:
    host = view.host(name)
    return host is not None and any(a.severity in GRAVE for a in host.alerts)

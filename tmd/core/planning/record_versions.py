"""In which version a record is written, and which hosts should lead if this one cannot read one.

Pure: what the leader has heard of the hosts comes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import structs

from tmd.core.values.model import (
    ADOPTING_VERSION,
    READABLE_VERSION,
    RECORD_VERSION,
    ClusterView,
    JobRecord,
)

REMEMBERED_S = 600.0
"""Longer than a daemon takes to be restarted or upgraded."""


class LastHeard(NamedTuple):
    """What a host read when it was heard last."""

    reads: int
    at: float
    """Monotonic seconds of the leader."""
    guessed: bool = False
    """It was never heard: ``reads`` is what was written while it was."""


Heard = Mapping[str, LastHeard]


def remembered(before: Heard, view: ClusterView, now: float) -> dict[str, LastHeard]:
    """What is known of the hosts that live or take part in a job. One that was never heard counts
    as if it had just been, and read what is written now: another leader may have heard it."""
    found = {h.host: LastHeard(h.reads, now) for h in view.hosts}
    # The last one counts: the earliest version in which a job of the host is written.
    latest_first = sorted(view.jobs, key=lambda r: -r.v)
    silent = {m.host: r.v for r in latest_first for m in r.parties if m.host not in found}
    for host, written in silent.items():
        found[host] = before.get(host) or LastHeard(written, now, guessed=True)
    return found


def recalled(view: ClusterView, heard: Heard, now: float) -> ClusterView:
    """``view`` with the silent hosts of jobs that could not read of adopted ranks when they were
    heard last, for :data:`REMEMBERED_S`.

    One that was never heard is not among them: with the host of a leader its rank is often lost as
    well, and no other rank would be adopted for as long.
    """
    known = {h.host for h in view.hosts}.union(view.unread)
    silent = sorted(
        host
        for host, last in heard.items()
        if host not in known
        and last.reads < ADOPTING_VERSION
        and not last.guessed
        and now - last.at <= REMEMBERED_S
    )
    return structs.replace(view, silent_earlier=tuple(silent)) if silent else view


def written_version(before: JobRecord | None, view: ClusterView, heard: Heard, now: float) -> int:
    """The version in which the next revision of ``before`` is written unless that needs a later
    one: :data:`RECORD_VERSION`, or the latest that all hosts read, but no earlier one than it has.
    It may hold what earlier ones do not have.

    A silent host that takes part in the job counts for :data:`REMEMBERED_S`: its workers train,
    and its daemon may return in a moment. Then it no longer delays the others.
    """
    live = {h.host: h.reads for h in view.hosts}
    if before is None:
        return min([RECORD_VERSION, *live.values()])
    silent = {m.host for m in before.parties} - live.keys() - set(view.unread)
    waited = [
        heard[host].reads
        for host in silent
        if host in heard and now - heard[host].at <= REMEMBERED_S
    ]
    return max(before.v, min([RECORD_VERSION, *live.values(), *waited]))


def needed_version(record: JobRecord) -> int:
    """The first version that may say what the membership and the plan of ``record`` say; 0 if any
    may. Its history is for people and needs none."""
    plan = record.plan
    memberships = (record.membership, *(() if plan is None else (plan.old, plan.new)))
    adopts = any(membership.adopted for membership in memberships)
    return ADOPTING_VERSION if adopts else 0


def successors(view: ClusterView, reads: int = READABLE_VERSION) -> frozenset[str]:
    """Hosts that may read the records that a leader which reads ``reads`` cannot; none if it can
    read all of them."""
    if not view.unread_jobs:
        return frozenset()
    return frozenset(view.unread).union(h.host for h in view.hosts if h.reads > reads)

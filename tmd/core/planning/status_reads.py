"""Which statuses of hosts a leader reads in a turn. Pure.

In a small cluster it reads all of them. Ten thousand would take it a second to decode, and a lost
rank would wait for that. There it reads in each turn those that may matter at once, and a part of
the others. A status that is not read again may be some seconds old; the leader still sees in each
turn whether the host is alive.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from typing import NamedTuple

from tmd.core.planning.migration import is_live
from tmd.core.values.model import ClusterView, JobState

AT_ONCE = 1000
"""Statuses that are read in turn. A cluster of so many hosts or fewer is read as a whole."""
EVERY_S = 1.0
"""How often; meanwhile only what may matter is read."""


class Reads(NamedTuple):
    """What is read next."""

    hosts: frozenset[str] | None
    """``None``: all."""
    last: str = ""
    """The host to which the turn has come."""


def next_reads(
    view: ClusterView | None, urgent: Collection[str] | None, last: str, seconds: float
) -> Reads:
    """``view``: the latest one; ``None`` if there is none.

    ``urgent``: hosts that have reported a change since; ``None`` if any host may have. ``last``:
    the host to which the turn has come, ``seconds`` ago.
    """
    if view is None or urgent is None or len(view.hosts) <= AT_ONCE:
        return Reads(None, last)
    due: list[str] = []
    if seconds >= EVERY_S:
        names = [host.host for host in view.hosts]
        first = bisect_right(names, last)
        due = (names[first:] + names[:first])[:AT_ONCE]
    return Reads(frozenset({*due, *urgent, *_watched(view)}), due[-1] if due else last)


def _watched(view: ClusterView) -> Iterator[str]:
    """Hosts about which something may have to be decided soon: those with findings, and those of a
    job that does not simply train."""
    for host in view.hosts:
        if host.alerts:
            yield host.host
    calm = {r.job for r in view.jobs if r.state is JobState.RUNNING and not is_live(r.plan)}
    for job in view.job_names - calm:
        yield from (host.host for host in view.hosts_of(job))

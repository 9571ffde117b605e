"""Hosts that speak, in words of another version: they are neither known nor silent.

Of a host that cannot be understood nothing may be concluded, least of all that it is gone. Jobs
with a rank there are left alone; all others go on.
"""

from __future__ import annotations

from tmd.core.model import ClusterView, JobRecord


def left_alone(record: JobRecord, view: ClusterView) -> str:
    """Why nothing is decided about the job, in a sentence; empty if nothing is in the way."""
    hosts = sorted({m.host for m in record.parties} & set(view.unread))
    if not hosts:
        return ""
    return f"{', '.join(hosts)} cannot be understood: update tmd here, or there"

"""The hosts of one view by name, and what they report by job.

A leader looks at each job of a view, and a cluster may have a hundred of them on ten thousand
hosts: looking through all hosts for each job would take longer than the time between two turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tmd.core.values.alert import Alert
    from tmd.core.values.model import Exit, HostStatus, WorkerStatus


class HostIndex:
    """Read-only once built."""

    def __init__(self, hosts: Sequence[HostStatus], reads: int) -> None:
        """``reads``: the version of records below which a host counts as one of an earlier tmd."""
        self.hosts: dict[str, HostStatus] = {}
        self.workers: dict[str, dict[str, WorkerStatus]] = {}
        """Statuses by job and worker."""
        self.exits: dict[str, dict[str, Exit]] = {}
        """Known exits by job and worker."""
        self.of_job: dict[str, dict[str, HostStatus]] = {}
        """Hosts with workers of a job, in the order of the view."""
        self.alerts: dict[str, list[Alert]] = {}
        """Findings about a job."""
        self.earlier = [host.host for host in hosts if host.reads < reads]
        """Hosts of an earlier tmd."""
        for host in hosts:
            self.hosts.setdefault(host.host, host)
            for worker in host.workers:
                self.workers.setdefault(worker.job, {})[worker.worker] = worker
                self.of_job.setdefault(worker.job, {})[host.host] = host
            for ended in host.exits:
                self.exits.setdefault(ended.job, {})[ended.worker] = ended
            for alert in host.alerts:
                if alert.job:
                    self.alerts.setdefault(alert.job, []).append(alert)

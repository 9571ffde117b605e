"""Whether the workers of a job let the same library carry their collectives.

Members of one group that use different ones, or different versions of NCCL, would wait for each
other for ever. So a worker that differs gets no rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tmd.core.values.model import WorkerStatus

REMEDY = (
    "set TMD_CUDA to the same value for all workers ('staged' does without NCCL), and install the "
    "same version of NCCL on all hosts"
)


def commonest(workers: Iterable[WorkerStatus]) -> str:
    """What carries the collectives of most of ``workers``; empty if none reports it."""
    found = Counter(w.carrier for w in workers if w.carrier)
    return min(found, key=lambda name: (-found[name], name), default="")


def mismatch(worker: WorkerStatus, carrier: str) -> str:
    """Why ``worker`` cannot communicate with workers that use ``carrier``; empty if it can, as far
    as known."""
    if not carrier or worker.carrier in ("", carrier):
        return ""
    return f"its collectives are carried by {worker.carrier}, those of the job by {carrier}"

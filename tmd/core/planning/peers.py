"""Whether a worker can communicate with the other workers of its job.

Members of one group whose collectives different libraries or versions of NCCL carry would wait for
each other for ever. Workers whose protocol has another version may not understand each other, and
compare states differently. So a worker that differs gets no rank. Daemons of 0.1.0 do not pass the
version on: such a worker may get one, and the handshake between workers then decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from tmd.core.values.model import WorkerStatus

SAME_CARRIER = (
    "set TMD_CUDA to the same value for all workers ('staged' does without NCCL), and install the "
    "same version of NCCL on all hosts"
)
SAME_PROTOCOL = (
    "all workers of a job need the same version: start this one with the release of tmd that the "
    "job has, or the whole job again"
)


class Communication(NamedTuple):
    """How most workers of a job communicate; empty and 0 are unknown."""

    carrier: str = ""
    protocol: int = 0


class Mismatch(NamedTuple):
    """Why a worker cannot communicate with the others."""

    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}"


def commonest(workers: Iterable[WorkerStatus]) -> Communication:
    """How most of ``workers`` communicate."""
    known = tuple(workers)
    carriers = Counter(w.carrier for w in known if w.carrier)
    protocols = Counter(w.protocol for w in known if w.protocol)
    return Communication(
        carrier=min(carriers, key=lambda name: (-carriers[name], name), default=""),
        protocol=max(protocols, key=lambda number: (protocols[number], number), default=0),
    )


def mismatch(worker: WorkerStatus, common: Communication) -> Mismatch | None:
    """Why ``worker`` cannot communicate with workers that do as ``common``; ``None`` if it can, as
    far as known."""
    if common.protocol and worker.protocol not in (0, common.protocol):
        theirs = f"those of the job use version {common.protocol}"
        difference = f"it uses version {worker.protocol} of the protocol between workers, {theirs}"
        return Mismatch(difference, SAME_PROTOCOL)
    if not common.carrier or worker.carrier in ("", common.carrier):
        return None
    difference = (
        f"its collectives are carried by {worker.carrier}, those of the job by {common.carrier}"
    )
    return Mismatch(difference, SAME_CARRIER)

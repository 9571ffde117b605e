"""What a detector states, and the alert that triage makes of it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from tmd.core.values.model import WorkerStatus

GPU = "pci:"
"""Prefix of the entity of a finding about a GPU, followed by its PCI address."""


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    DEGRADED = "degraded"  # still works; ranks should be moved away in an orderly way
    FATAL = "fatal"  # has stopped working

    @property
    def grade(self) -> int:
        """Higher is graver."""
        return _GRADES[self]


_GRADES = {severity: grade for grade, severity in enumerate(Severity)}


class State(StrEnum):
    RAISED = "raised"
    CLEARED = "cleared"


class Strategy(StrEnum):
    """Permission of a detector's findings (config, per detector), the least one first."""

    OBSERVE = "observe"
    ADVISE = "advise"
    ACT = "act"


class Signal(Struct, frozen=True):
    """One fact stated by a detector, without a judgement; triage judges."""

    code: str
    """The kind of fact, dotted: ``trainer.exited``."""
    entity: str
    """The object concerned: a worker id, ``nic:eth0``, ``host``, a GPU: ``pci:0000:3b:00.0``."""
    severity: Severity
    state: State = State.RAISED
    message: str = ""
    job: str = ""
    evidence: tuple[str, ...] = ()
    count: int = 1
    """Occurrences since the previous signal about it: a storm is one signal."""
    event: str = ""
    """Unique name, for this code and host, of an event that happens only once (that worker's exit):
    a restarted daemon that sees it again raises no new alert."""


class Alert(Struct, frozen=True, gc=False):
    """A raised or cleared finding; published, and part of the host status while raised."""

    id: str
    host: str
    detector: str
    code: str
    entity: str
    severity: Severity
    state: State
    message: str
    job: str
    strategy: Strategy
    count: int
    at: float
    evidence: tuple[str, ...] = ()
    stated: Severity | None = None
    """The detector's severity, if repetitions have raised it."""
    v: int = 1
    """Version of this schema."""
    worse_at: float | None = None
    """When it reached its severity, if it was raised with a lower one; as ``at``, of its host's
    wall clock."""

    @property
    def reached_at(self) -> float:
        """When it reached its severity."""
        return self.at if self.worse_at is None else self.worse_at

    def may_concern(self, worker: WorkerStatus) -> bool:
        """Whether it may affect ``worker``, on the same host: not if it is about a GPU that the
        worker does not use."""
        about_gpu = self.entity.startswith(GPU)
        return not (about_gpu and worker.devices) or self.entity in worker.devices

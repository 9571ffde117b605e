"""The public plug-in API: everything that a detector or a policy may import.

A detector states facts as :class:`Signal`; a policy examines a :class:`ClusterView` and states its
demands as :class:`Verdict`. The entry-point groups ``tmd.detectors`` and ``tmd.policies`` name
both. The plug-ins that ship with tmd use nothing but this module.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Protocol

from msgspec import Struct

from tmd.boot import boot_id
from tmd.child import Child, readable
from tmd.core.values.errors import PluginError
from tmd.core.values.model import (
    Activity,
    Alert,
    ClusterView,
    Exit,
    HostStatus,
    JobRecord,
    JobState,
    Mark,
    Member,
    Membership,
    MigrationPlan,
    Move,
    Phase,
    PlanKind,
    Severity,
    Signal,
    State,
    Strategy,
    Urgency,
    Verdict,
    WorkerStatus,
)
from tmd.core.values.numbers import Count, NotNegative, Positive
from tmd.core.values.pace import Pace
from tmd.core.values.reasons import in_words, os_reason
from tmd.core.values.requests import DrainRequest
from tmd.replaced_file import ReplacedFile

__all__ = [
    "API_VERSION",
    "Activity",
    "Alert",
    "Child",
    "ClusterView",
    "Count",
    "Detector",
    "DetectorConfig",
    "DetectorContext",
    "DrainRequest",
    "Exit",
    "HostStatus",
    "JobRecord",
    "JobState",
    "Mark",
    "Member",
    "Membership",
    "MigrationPlan",
    "Move",
    "NotNegative",
    "Pace",
    "Phase",
    "PlanKind",
    "PluginError",
    "Policy",
    "PolicyConfig",
    "Positive",
    "ReplacedFile",
    "Severity",
    "Signal",
    "State",
    "Strategy",
    "Urgency",
    "Verdict",
    "WorkerEvent",
    "WorkerStatus",
    "bare_python",
    "boot_id",
    "in_words",
    "os_reason",
    "readable",
]

API_VERSION = 1

DETECTOR_GROUP = "tmd.detectors"
POLICY_GROUP = "tmd.policies"


class WorkerEvent(Struct, frozen=True):
    """The current situation of one worker of this host."""

    worker: str
    job: str
    status: WorkerStatus | None = None
    """Its latest report; ``None`` if there was none."""
    exit: Exit | None = None
    """Set once it ended, or the kernel has begun to end it: see ``code``."""
    connected: bool = False
    silent_s: float = 0.0
    """Time since the last message on its connection; a live trainer sends one every half second."""
    forgotten: bool = False
    """Its exit is so long ago that the host no longer reports it: clear your findings about it."""


class DetectorConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Base for a detector's own keys under ``[detectors.<name>]``. Every field needs a default."""


class PolicyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Base for a policy's own keys under ``[policies.<name>]``. Every field needs a default."""


class DetectorContext(Protocol):
    """Access of a detector to its host."""

    @property
    def host(self) -> str:
        """Name of this host."""

    @property
    def config(self) -> DetectorConfig:
        """An instance of the detector's ``Config``."""

    @property
    def state_dir(self) -> Path:
        """The detector's own folder, which survives a restart. It exists."""

    def now(self) -> float:
        """Monotonic seconds: the only clock for time-outs."""

    async def sleep(self, seconds: float) -> None:
        """Pause; also shows the supervisor that the detector is alive."""

    def looked(self) -> None:
        """The detector has looked at all that it watches, at least once: see ``says_looked``."""

    def worker_events(self) -> AsyncIterator[WorkerEvent]:
        """Every change of a worker of this host, and all live ones again every half second.

        Level-triggered: a slow reader sees the latest event of each worker, never a backlog.
        """


class Detector(ABC):
    """States facts about one host. Runs in its own task, on the daemon's event loop.

    The daemon makes an object of it at its start and at each reload, and drops the new one if the
    configuration of the detector has not changed. So ``__init__`` acquires nothing that must be
    given back, such as a file, a thread or a socket: acquire it in :meth:`watch`.
    """

    name: ClassVar[str]
    Config: ClassVar[type[DetectorConfig]] = DetectorConfig
    deadline_s: ClassVar[float | None] = None
    """If set: the detector promises to yield, sleep or take an event at least this often, and is
    restarted when it does not. The deadline rests while it waits in a call of its context."""

    says_looked: ClassVar[bool] = False
    """If set: the detector calls ``ctx.looked()`` after its first complete look. Before that
    ``tmd scan`` takes the state of the host for unknown."""

    def supported(self) -> str | None:
        """Why this detector cannot work on this host, or ``None`` if it can.

        Must not block, like :meth:`watch`: it is called on the event loop before each start of
        :meth:`watch`, and again every ten seconds while it gives a reason, or more rarely if it
        takes longer than a tenth of a second. Start no tool in it.
        """
        return None

    def supported_with(self, config: DetectorConfig) -> str | None:
        """The same with its own keys: override it if they determine what is watched."""
        return self.supported()

    def sources_with(self, config: DetectorConfig) -> str:
        """Its sources on this host, for people; empty if they are obvious."""
        return ""

    def declared_healthy(self, code: str) -> None:  # noqa: B027 - detectors may override it
        """An operator has declared the findings of ``code`` over; all of them if it is empty.

        Override it if findings are stated again after a restart because they are remembered, not
        because they still hold: they must be forgotten. Override it, too, if a finding must be
        stated again because it still holds and cannot wait for a person. Must not block.
        """

    @abstractmethod
    def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        """Yield signals for ever. Written as ``async def`` with ``yield``; must not block.

        An exception is contained and reported; the detector is started again after a pause.
        """


class Policy(ABC):
    """States what should happen, never how. Pure: no IO, no clock, no memory.

    It sees no finding of a detector that only observes, and must not move a rank for a finding
    whose ``strategy`` is not :attr:`Strategy.ACT`.
    """

    name: ClassVar[str]
    Config: ClassVar[type[PolicyConfig]] = PolicyConfig

    def __init__(self, config: PolicyConfig | None = None) -> None:
        self.config = config if config is not None else self.Config()

    @abstractmethod
    def decide(self, view: ClusterView) -> Sequence[Verdict]:
        """Verdicts about rank-holding workers. Called at every change, so repeats are expected."""


_BARE = (
    "import sys; from importlib import import_module; "
    "module, path = sys.argv[1:3]; sys.path += path.split('\\n'); "
    "import_module(module).main(*sys.argv[3:])"
)


def bare_python(file: Path, *arguments: str, needs: Sequence[str] = ()) -> list[str]:
    """Command line of a process that calls ``main(*arguments)`` of the module in ``file``.

    For a reader that may hang and therefore needs a separate process. With only the standard
    library, the package of ``file`` and the modules ``needs`` it takes half the memory and half the
    time to start of a process that can import all installed packages.
    """
    path = "\n".join(map(str, [file.parents[1], *map(_place, needs)]))
    module = f"{file.parent.name}.{file.stem}"
    return [sys.executable, "-S", "-P", "-c", _BARE, module, path, *arguments]


def _place(module: str) -> Path:
    """The folder from which ``module`` is imported."""
    found = find_spec(module)
    if found is None or found.origin is None:
        raise PluginError(f"there is no module {module}: install tmd with all it depends on")
    file = Path(found.origin)
    return file.parents[1] if found.submodule_search_locations else file.parent

"""The words of the project as frozen values.

Every value that crosses a boundary (Redis, the Unix socket, a plug-in) is one of these, so that a
reader learns the whole vocabulary here. Times named ``*_at`` are wall-clock seconds and only ever
shown to people; nothing decides by them.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from tmd.core.values.breaker_state import Breaker
from tmd.core.values.checkpoints import MissedCheckpoint, SavedCheckpoint
from tmd.core.values.membership import Member as Member
from tmd.core.values.membership import Membership as Membership
from tmd.core.values.pace import Pace
from tmd.core.values.requests import DrainRequest, RehearsalRequest
from tmd.core.values.shadows import Rehearsal as Rehearsal
from tmd.core.values.shadows import ShadowStatus as ShadowStatus
from tmd.core.values.shadows import Understudy as Understudy
from tmd.core.values.shadows import Verdicts, unfitness
from tmd.core.values.snapshots import Kept, Rollback

# --- what a worker says of itself ---------------------------------------------------------------


class Activity(StrEnum):
    """What a worker is doing. The trainer alone sets it; the leader only reads it."""

    STARTING = "starting"  # connected, its script is still importing and building
    STANDBY = "standby"  # holds no rank, has run its shadow iterations, waits
    TRAINING = "training"  # runs the steps of `epoch`
    STUCK = "stuck"  # its step is poisoned or its vote broke: waits for a plan
    SHADOWING = "shadowing"  # joiner or hot standby: gets the state, then computes the rank's steps
    IN_STEP = "in step"  # joiner or hot standby: same bits as its rank, not behind; see `shadow`
    PREPARED = "prepared"  # joiner of `plan`: its links are open, the state comes at the switch
    SYNCED = "synced"  # has the state of the resume step of `plan`, waits for the others
    LEFT = "left"  # leaver after the switch: no rank any more, still holds its state
    REFUSED = "refused"  # cannot do what `plan` asks; `detail` says why


class WorkerStatus(Struct, frozen=True):
    """The latest report of one worker. Level-triggered: repeating it changes nothing."""

    worker: str
    job: str
    world_size: int
    address: str
    pid: int
    activity: Activity
    rank: int | None = None
    epoch: int = 0
    step: int = 0
    """Committed steps, so also the number of the step it is in now."""
    undecided: bool = False
    """STUCK inside the vote with ok = 1: complete gradients of step ``step`` are at hand."""
    armed: int = 0
    """The epoch it is ready to switch to at a step boundary; 0 for none."""
    plan: str = ""
    """The plan that ``activity`` and ``armed`` refer to."""
    suspects: tuple[str, ...] = ()
    """Workers whose link to this one broke first in the present poisoned step."""
    loss: float | None = None
    step_seconds: float = 0.0
    stands_s: float = 0.0
    """Seconds (monotonic) that it has held a rank at ``step``, whoever it waits for."""
    holds: tuple[int, ...] = ()
    """Ranks whose rank-local state, as of ``step``, was laid away here."""
    replicas: tuple[int, ...] = ()
    """Ranks of equal state, itself included; empty until the state is registered."""
    serves: tuple[int, ...] = ()
    """Ranks that it can be as it is built; empty if it can be any, or that is not known."""
    kept: tuple[Kept, ...] = ()
    """Copies in its memory to which a rank can go back."""
    pace: Pace | None = None
    """Set while it holds a rank and has run enough steps with others to compare itself to."""
    waiting: bool = False
    """Blocked in a collective: it is others that are late."""
    links_opened: int = 0
    rss_bytes: int = 0
    detail: str = ""
    shadow: ShadowStatus | None = None
    """How far it follows, or (STANDBY) has followed: the state of the rank as of ``step``."""
    role: str = ""
    """Digest of what its rank is built as, names, shapes, types and sizes of groups; else empty."""
    rehearsed: Verdicts = ()
    """What its rehearsals have shown."""
    timings: dict[str, float] = {}
    """Seconds by name, measured on this worker for ``plan`` (``transfer``, ``prepare``...)."""
    devices: tuple[str, ...] = ()
    """GPUs that hold its model, as findings name them; empty if that is not known."""
    saved: SavedCheckpoint | None = None
    """The newest complete checkpoint that it knows of."""
    missed: MissedCheckpoint | None = None
    """The newest one that came to nothing, until there is a later one that is complete."""

    @property
    def unfit(self) -> str:
        """Why this standby gets no rank, or not some; empty if it may have any."""
        return unfitness(self.rehearsed)


class Exit(Struct, frozen=True):
    """A worker process ended, as seen by the launcher that started it, or begins to end."""

    worker: str
    job: str
    code: int | None
    """Exit status; negative for a signal, as in :mod:`subprocess`. ``None`` while the kernel still
    takes the process apart; its links may stay open until that is done."""
    at: float
    """When that was seen first."""


# --- what a detector says -----------------------------------------------------------------------


GPU = "pci:"
"""Begins the entity of a finding about a GPU; its PCI address follows."""


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    DEGRADED = "degraded"  # still works; should be left in an orderly way
    FATAL = "fatal"  # has stopped working

    @property
    def grade(self) -> int:
        """The higher, the graver."""
        return _GRADES[self]


_GRADES = {severity: grade for grade, severity in enumerate(Severity)}


class State(StrEnum):
    RAISED = "raised"
    CLEARED = "cleared"


class Strategy(StrEnum):
    """How far a detector's findings may go (config, per detector)."""

    OBSERVE = "observe"
    ADVISE = "advise"
    ACT = "act"


class Signal(Struct, frozen=True):
    """One fact stated by a detector. It judges nothing; triage does."""

    code: str
    """What was seen, dotted: ``trainer.exited``."""
    entity: str
    """What it is about: a worker id, ``nic:eth0``, ``host``, a GPU: ``pci:0000:3b:00.0``."""
    severity: Severity
    state: State = State.RAISED
    message: str = ""
    job: str = ""
    evidence: tuple[str, ...] = ()
    count: int = 1
    """How many times it was seen since the last signal about it: a storm is one signal."""
    event: str = ""
    """Names, for this code and host for ever, what happened only once (the exit of that worker): a
    daemon that has restarted and is told of it again does not raise a new alert."""


class Alert(Struct, frozen=True):
    """A finding that is raised or cleared; published, and held in the host status while raised."""

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
    """What the detector said, where only its coming back made it graver."""
    v: int = 1
    """Version of this schema."""

    def may_concern(self, worker: WorkerStatus) -> bool:
        """Whether it may be a trouble of ``worker``, of the same host: all are but those of a GPU
        if the worker is known to use others."""
        about_gpu = self.entity.startswith(GPU)
        return not (about_gpu and worker.devices) or self.entity in worker.devices


# --- what a host says ---------------------------------------------------------------------------


class HostStatus(Struct, frozen=True):
    """The heartbeat of one daemon; expires in the store when the daemon falls silent."""

    host: str
    incarnation: str
    """Boot of this daemon: a restart gets a new one."""
    standby: bool = False
    """Config: workers here should start as standbys when there is a choice."""
    workers: tuple[WorkerStatus, ...] = ()
    exits: tuple[Exit, ...] = ()
    """Recent exits of workers of this host, newest last, bounded."""
    alerts: tuple[Alert, ...] = ()
    """Alerts raised now."""
    obeyed: int = 0
    """Highest lease epoch this host has obeyed (invariant I5)."""
    at: float = 0.0


# --- what the leader decides --------------------------------------------------------------------


class Urgency(StrEnum):
    FAILED = "failed"  # the worker is gone or must be treated as gone: failover
    DRAIN = "drain"  # the worker is healthy enough to hand over: planned replacement


class Verdict(Struct, frozen=True):
    """What a policy wants, and why."""

    job: str
    worker: str
    urgency: Urgency
    cause: str
    """Code of the alert or the request: ``trainer.exited``, ``drain``."""
    reason: str
    """A sentence for people."""
    policy: str = ""
    leave: bool = False
    """Drain only: the leaver exits after the move instead of returning to the pool."""
    request: str = ""
    """Drain only: id of the request."""


class PlanKind(StrEnum):
    PLANNED = "planned"
    FAILOVER = "failover"


class Phase(StrEnum):
    """Phases of a migration; the table of legal moves is in :mod:`tmd.core.planning.migration`."""

    PREPARE = "prepare"
    READY = "ready"
    SWITCH = "switch"
    DISARM = "disarm"
    RECOVER = "recover"
    SYNC = "sync"
    RESUME = "resume"
    DONE = "done"
    ABORTED = "aborted"


FINAL = frozenset({Phase.DONE, Phase.ABORTED})


class Move(Struct, frozen=True):
    """One rank changes hands."""

    rank: int
    leaver: Member
    joiner: Member | None = None
    """``None``: no standby yet, the job holds."""
    source: Member | None = None
    """The worker whose state the joiner copies."""


class Mark(Struct, frozen=True):
    """When a plan entered a phase (wall clock, for people)."""

    phase: Phase
    at: float


class MigrationPlan(Struct, frozen=True):
    """The stored plan is the command: everybody derives its directive from it."""

    id: str
    kind: PlanKind
    phase: Phase
    moves: tuple[Move, ...]
    old: Membership
    new: Membership
    """Failover: final only from SYNC on; before, the owners are not settled."""
    cause: str
    reason: str
    policy: str = ""
    leave: bool = False
    request: str = ""
    """Id of the drain request that this plan serves."""
    dead: tuple[str, ...] = ()
    """Failover: workers named dead; their launchers end whatever is left of them."""
    witnesses: tuple[Member, ...] = ()
    """Failover: everybody who may hold the state of a rank, the dead included."""
    resume: int | None = None
    """Failover: the step that is run first in the new epoch, once known."""
    whole: int | None = None
    """Failover: the newest snapshot of which every rank's copy is still there."""
    rollback: Rollback | None = None
    """Failover: a state that existed once is lost, so all go back. Never taken back."""
    floor: int = 0
    """Failover: the highest resume step ever ordered. Somebody may have rolled forward to it, so a
    rewritten plan never falls below it."""
    rejected: tuple[str, ...] = ()
    """Workers that were lost or refused as joiners of this plan and are not tried again."""
    late: tuple[str, ...] = ()
    """Joiners that did not sync in time; tried again only if there is no other."""
    choice: tuple[str, ...] = ()
    """Why these joiners and no others, in sentences for people."""
    how: str = ""
    """Planned, from READY on: by live shadow, or why by stop-and-copy."""
    timeline: tuple[Mark, ...] = ()
    timings: dict[str, float] = {}
    """Seconds by name reported by the workers of the plan."""
    outcome: str = ""
    """A sentence for people, once final."""


class JobState(StrEnum):
    RUNNING = "running"
    FINISHING = "finishing"  # a rank has come to the end of training: nobody is replaced any more
    FINISHED = "finished"
    FAILED = "failed"


class JobRecord(Struct, frozen=True):
    """Everything the cluster agrees on about one job; one key, changed by compare-and-set."""

    job: str
    world_size: int
    state: JobState
    membership: Membership
    proposed: int
    """Highest epoch ever proposed. A number is never proposed twice, not even after an abort, so
    that nothing prepared for a dropped change can be taken for part of a later one
    (invariant I9)."""
    revision: int = 0
    lease_epoch: int = 0
    """Of the leader that wrote this revision."""
    plan: MigrationPlan | None = None
    """The one live plan (invariant I1), or the last one if its phase is final."""
    history: tuple[MigrationPlan, ...] = ()
    """Final plans, newest last, bounded."""
    detail: str = ""
    understudies: tuple[Understudy, ...] = ()
    """Standbys that follow a rank now."""

    @property
    def parties(self) -> tuple[Member, ...]:
        """Members, and whoever the plan, live or final, is about."""
        members, plan = self.membership.members, self.plan
        if plan is None:
            return members
        return tuple(dict.fromkeys((*members, *plan.witnesses, *plan.new.members)))

    @property
    def holders(self) -> tuple[Member, ...]:
        """Members, and whoever may hold the state of a rank in a failover under way."""
        plan = self.plan
        recovers = plan is not None and plan.kind is PlanKind.FAILOVER and plan.phase not in FINAL
        return self.parties if recovers else self.membership.members

    def served(self, request: DrainRequest) -> bool:
        """Whether a finished plan has carried out ``request``."""
        return any(p.request == request.id and p.phase is Phase.DONE for p in self.history)


class ClusterView(Struct, frozen=True):
    """One consistent look at the cluster: all that a policy may decide by."""

    hosts: tuple[HostStatus, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    drains: tuple[DrainRequest, ...] = ()
    rehearsals: tuple[RehearsalRequest, ...] = ()
    paused: bool = False
    """An operator asked that nothing new be started."""
    breaker: Breaker = Breaker()
    unread: tuple[str, ...] = ()
    """Hosts that are heard, in words of another version."""

    def workers(self, job: str) -> dict[str, WorkerStatus]:
        """Statuses of all workers of ``job`` on hosts that are heard from."""
        return {w.worker: w for h in self.hosts for w in h.workers if w.job == job}

    def exits(self, job: str) -> dict[str, Exit]:
        """Known exits of workers of ``job``."""
        return {e.worker: e for h in self.hosts for e in h.exits if e.job == job}

    def host(self, name: str) -> HostStatus | None:
        return next((h for h in self.hosts if h.host == name), None)

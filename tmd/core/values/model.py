"""The values that the parts of the project exchange, all frozen.

Every value that crosses a boundary (Redis, the Unix socket, a plug-in) is defined here or beside
this module. Times named ``*_at`` are wall-clock seconds for people; no decision depends on them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from functools import cached_property

from msgspec import Struct, field, structs

from tmd.core.values.alert import GPU as GPU
from tmd.core.values.alert import Alert as Alert
from tmd.core.values.alert import Severity as Severity
from tmd.core.values.alert import Signal as Signal
from tmd.core.values.alert import State as State
from tmd.core.values.alert import Strategy as Strategy
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.checkpoints import MissedCheckpoint, SavedCheckpoint
from tmd.core.values.demands import Urgency as Urgency
from tmd.core.values.demands import Verdict as Verdict
from tmd.core.values.host_index import HostIndex
from tmd.core.values.membership import Member as Member
from tmd.core.values.membership import Membership as Membership
from tmd.core.values.pace import Pace
from tmd.core.values.requests import DrainRequest, RehearsalRequest
from tmd.core.values.shadows import Rehearsal as Rehearsal
from tmd.core.values.shadows import ShadowAssignment as ShadowAssignment
from tmd.core.values.shadows import ShadowStatus as ShadowStatus
from tmd.core.values.shadows import Verdicts, unfitness
from tmd.core.values.snapshots import Kept, Rollback

# --- the status of a worker -----------------------------------------------------------------------


class Activity(StrEnum):
    """The activity of a worker. Only the trainer sets it; the leader reads it."""

    STARTING = "starting"  # connected; its script is still importing and building
    STANDBY = "standby"  # holds no rank, has run its shadow iterations, waits
    TRAINING = "training"  # runs the steps of `epoch`
    STUCK = "stuck"  # its step is poisoned or its vote broke: waits for a plan
    SHADOWING = "shadowing"  # joiner or hot standby: gets the state, then computes the rank's steps
    IN_STEP = "in step"  # joiner or hot standby: same bits as its rank, not behind; see `shadow`
    PREPARED = "prepared"  # joiner of `plan`: its links are open, the state comes at the switch
    SYNCED = "synced"  # has the state of the resume step of `plan`, waits for the other ranks
    LEFT = "left"  # leaver after the switch: holds no rank, but still its state
    REFUSED = "refused"  # cannot take part in `plan`; `detail` has the reason


# gc=False: frozen values have no cycles, and a leader holds a hundred thousand of them, all of
# which the collector would visit again and again.
class WorkerStatus(Struct, frozen=True, gc=False):
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
    """Number of committed steps, and so of the current step."""
    undecided: bool = False
    """The result of its vote is unknown: it has complete gradients of ``step``."""
    armed: int = 0
    """The epoch that it is ready to switch to at a step boundary; 0 for none."""
    plan: str = ""
    """The plan that ``activity`` and ``armed`` refer to."""
    suspects: tuple[str, ...] = ()
    """Workers whose link to this one broke first in the current poisoned step."""
    loss: float | None = None
    step_seconds: float = 0.0
    stands_s: float = 0.0  # seconds (monotonic) for which it has held a rank at `step`
    holds: tuple[int, ...] = ()
    """Ranks whose rank-local state at the start of ``step`` is stored here."""
    replicas: tuple[int, ...] = ()
    """Ranks of equal state, including its own; empty until the state is registered."""
    serves: tuple[int, ...] = ()
    """Ranks that its built objects can serve; empty if any, or unknown."""
    kept: tuple[Kept, ...] = ()
    """Copies in its memory for a rollback."""
    pace: Pace | None = None
    """Set while it holds a rank and has run enough steps to compare itself with its peers."""
    waiting: bool = False  # blocked in a collective: other ranks are late
    links_opened: int = 0
    rss_bytes: int = 0
    kept_bytes: int = 0  # of host memory: inputs of collectives, to finish a step after a loss
    detail: str = ""
    shadow: ShadowStatus | None = None
    """Progress of its shadow, or (STANDBY) of the last one: the rank's state at ``step``."""
    role: str = ""
    """Digest of the build of its rank: names, shapes, types and sizes of groups; or empty."""
    rehearsed: Verdicts = ()
    """Verdicts of its rehearsals."""
    timings: dict[str, float] = {}
    """Seconds by name, measured on this worker for ``plan`` (``transfer``, ``prepare``...)."""
    devices: tuple[str, ...] = ()
    """GPUs that hold its model, as findings name them; empty if unknown."""
    saved: SavedCheckpoint | None = None
    """The newest complete checkpoint it knows."""
    missed: MissedCheckpoint | None = None  # the newest one, until a later one is complete
    unregistered: str = ""  # what steps change although it is not registered; empty if unknown
    first_rank: int | None = None  # what its script got as its rank when it began
    rank_kept: str = ""  # where the script's loop decides by an old rank; empty if unknown
    carrier: str = ""  # of its collectives, with the version of a library; empty if unknown
    beside_obstacle: str = ""  # why its inner groups cannot be built beside training
    elastic: str | None = None
    """Why it cannot compute for several ranks; empty if it can, ``None`` if its script has not
    asked for that."""
    protocol: int = 0  # version of what workers exchange; 0: their daemon did not pass it on
    entered: int | None = None  # its step when it entered `epoch`; None: its release is older

    @property
    def unfit(self) -> str:
        """Why this standby gets no rank, or only some; empty if it may get any."""
        return unfitness(self.rehearsed)


class Exit(Struct, frozen=True, gc=False):
    """The end of a worker process as seen by its launcher; the process may still be ending."""

    worker: str
    job: str
    code: int | None
    """Exit status, as in :mod:`subprocess`; ``None`` while the kernel still ends the process."""
    at: float  # when its end was first seen
    stopped: bool = False  # it exited with 0 at the SIGTERM of its launcher, which `code` names


# --- the status of a host -------------------------------------------------------------------------


class HostStatus(Struct, frozen=True, gc=False):
    """The heartbeat of one daemon; expires in the store when the daemon is silent."""

    host: str
    incarnation: str  # of this run of the daemon; a restart gets a new one
    standby: bool = False
    """Config: whether workers here should preferably start as standbys."""
    workers: tuple[WorkerStatus, ...] = ()
    exits: tuple[Exit, ...] = ()
    """Recent exits of workers of this host, newest last, a bounded number."""
    alerts: tuple[Alert, ...] = ()
    """Alerts that are raised now."""
    obeyed: int = 0
    """Highest lease epoch that this host has obeyed (invariant I5)."""
    lost: dict[str, dict[str, float]] = {}
    """job -> cause -> lost rank seconds that this daemon has counted and that no record has yet."""
    reads: int = 1
    """:data:`READABLE_VERSION` of the daemon. While it lives, no record gets a later version; one
    that has it already keeps it."""
    boot: str = ""  # of the machine; two machines with one name differ in it
    at: float = 0.0

    @property
    def listener(self) -> str:
        """The name under which its daemon hears what concerns it, and asks for the lease."""
        return f"{self.host}#{self.incarnation}"


# --- the leader's decisions -----------------------------------------------------------------------


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
    """One rank moves to another worker."""

    rank: int
    leaver: Member
    joiner: Member | None = None
    """``None``: no standby yet; the job holds."""
    source: Member | None = None
    """The worker whose state the joiner copies."""


class Mark(Struct, frozen=True):
    """Time at which a plan entered a phase (wall clock, for people)."""

    phase: Phase
    at: float


class MigrationPlan(Struct, frozen=True):
    """The stored plan is the command: every daemon derives its directives from it."""

    id: str
    kind: PlanKind
    phase: Phase
    moves: tuple[Move, ...]
    old: Membership
    new: Membership
    """Failover: final only from SYNC on; the owners of ranks are not settled earlier."""
    cause: str
    reason: str
    policy: str = ""
    leave: bool = False
    request: str = ""
    """Id of the drain request that this plan serves."""
    dead: tuple[str, ...] = ()
    """Failover: workers named dead; their launchers kill any remaining process."""
    witnesses: tuple[Member, ...] = ()
    """Failover: workers that may hold the state of a rank, including the dead."""
    resume: int | None = None
    """Failover: the first step of the new epoch, once known."""
    whole: int | None = None
    """Failover: the newest snapshot with a copy for every rank."""
    rollback: Rollback | None = None
    """Failover: a unique state is lost, so all ranks return to a snapshot. Never withdrawn."""
    floor: int = 0
    """Failover: the highest resume step ever ordered. A survivor may have rolled forward to it, so
    a rewritten plan never falls below it."""
    rejected: tuple[str, ...] = ()
    """Workers that were lost or refused as joiners of this plan and are not tried again."""
    late: tuple[str, ...] = ()
    """Joiners that did not sync in time; tried again only as a last resort."""
    choice: tuple[str, ...] = ()
    """Reasons for the choice of joiners, in sentences for people."""
    how: str = ""
    """Planned, from READY on: "live shadow", or "stop-and-copy" with the reason."""
    builds_at_switch: str = ""  # why inner groups are not built beside training; empty if they are
    timeline: tuple[Mark, ...] = ()
    timings: dict[str, float] = {}
    """Seconds by name reported by the workers of the plan."""
    outcome: str = ""
    """A sentence for people, once final."""

    def taker_of(self, move: Move) -> str:
        """The host to which a rank goes, or who adopts it; empty if that is not known."""
        if move.joiner is not None:
            return move.joiner.host
        return self.new.adopter_of(move.rank)


class JobState(StrEnum):
    RUNNING = "running"
    FINISHING = "finishing"  # a rank has ended training: no rank is replaced any more
    FINISHED = "finished"
    FAILED = "failed"


RECORD_VERSION = 1
"""Grows when an older tmd must not act on a record, since it would miss what a field means. While
a host reads only an earlier version, the leader writes that one, and nothing that needs a later."""
ADOPTING_VERSION = 2
"""Of a record whose membership or plan names adopted ranks, and of all later ones of that job: an
older tmd would take a worker for the holder of another rank. It can read all other records."""
READABLE_VERSION = 2
"""The latest version that this tmd reads."""


class Credit(Struct, frozen=True):
    """The latest addition of one leader to the lost time of a job. From it that leader learns
    whether a write whose answer was lost has been stored."""

    lease_epoch: int
    revision: int
    """That of its latest addition."""


class JobRecord(Struct, frozen=True):
    """The agreed facts about one job; one key, changed by compare-and-set."""

    job: str
    world_size: int
    state: JobState
    membership: Membership
    proposed: int
    """Highest epoch ever proposed. A number is never proposed twice, not even after an abort, so
    that nothing prepared for a dropped change is used for a later one (invariant I9)."""
    revision: int = 0
    lease_epoch: int = 0
    """Lease epoch of the leader that wrote this revision."""
    plan: MigrationPlan | None = None
    """The one live plan (invariant I1), or the last one if its phase is final."""
    history: tuple[MigrationPlan, ...] = ()
    """Final plans, newest last, a bounded number."""
    detail: str = ""
    # Stored under the name that it has had since 0.1.0, so that either version reads the other's.
    shadows: tuple[ShadowAssignment, ...] = field(default=(), name="understudies")
    """Standbys that shadow a rank now."""
    v: int = 1
    """Version in which it is written, at most :data:`READABLE_VERSION` of its leader. One that is
    above that of a reader is left alone there: see :mod:`tmd.daemon.job_records`."""
    lost: dict[str, float] = {}  # cause -> rank seconds, counted by all leaders of this run
    credited: tuple[Credit, ...] = ()  # latest leaders that added to `lost`, by lease epoch
    dismissed: tuple[str, ...] = ()  # without a rank, and to exit: drained with ``leave``
    ended_at: float = 0.0  # wall-clock time at which a leader saw its end; 0 before
    trained: bool = False  # failed after a rank had come to the end of training

    @property
    def parties(self) -> tuple[Member, ...]:
        """Members, and all workers in the live or final plan."""
        members, plan = self.membership.members, self.plan
        if plan is None:
            return members
        return tuple(dict.fromkeys((*members, *plan.witnesses, *plan.new.members)))

    @property
    def holders(self) -> tuple[Member, ...]:
        """Members, and workers that may hold the state of a rank in the current failover."""
        # In later phases of a failover all ranks have new holders. Only a failover recovers.
        recovers = self.plan is not None and self.plan.phase in (Phase.RECOVER, Phase.SYNC)
        return self.parties if recovers else self.membership.members

    def served(self, request: DrainRequest) -> bool:
        """Whether a finished plan has served ``request``."""
        return any(p.request == request.id and p.phase is Phase.DONE for p in self.history)


class ClusterView(Struct, frozen=True, dict=True):
    """One consistent snapshot of the cluster: the only input of a policy."""

    hosts: tuple[HostStatus, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    drains: tuple[DrainRequest, ...] = ()
    rehearsals: tuple[RehearsalRequest, ...] = ()
    paused: bool = False
    """Whether an operator has paused new plans."""
    breaker: Breaker = Breaker()
    unread: tuple[str, ...] = ()
    """Hosts whose heartbeats have another version."""
    unread_jobs: tuple[str, ...] = ()
    """Jobs whose records have another version, so that they are not among ``jobs``."""
    silent_earlier: tuple[str, ...] = ()
    """Silent hosts of an earlier tmd, as the leader remembers them."""

    @cached_property
    def _index(self) -> HostIndex:
        return HostIndex(self.hosts, ADOPTING_VERSION)

    @property
    def job_names(self) -> frozenset[str]:
        """Jobs that have workers, or a record that can be read."""
        return frozenset(self._index.of_job).union(r.job for r in self.jobs)

    def workers(self, job: str) -> Mapping[str, WorkerStatus]:
        """Statuses of all workers of ``job`` on hosts with a heartbeat."""
        return self._index.workers.get(job, {})

    def exits(self, job: str) -> Mapping[str, Exit]:
        """Known exits of workers of ``job``."""
        return self._index.exits.get(job, {})

    def hosts_of(self, job: str) -> Collection[HostStatus]:
        """Hosts with workers of ``job``."""
        return self._index.of_job.get(job, {}).values()

    def findings(self, job: str) -> Sequence[Alert]:
        """Findings of all hosts about ``job``."""
        return self._index.alerts.get(job, ())

    @cached_property
    def earlier(self) -> Sequence[str]:
        """Hosts whose daemons could not read of adopted ranks, as far as known."""
        return (*self._index.earlier, *self.silent_earlier)

    @cached_property
    def _records(self) -> Mapping[str, JobRecord]:
        return {record.job: record for record in self.jobs}

    def record(self, job: str) -> JobRecord | None:
        return self._records.get(job)

    def with_record(self, record: JobRecord) -> ClusterView:
        """The view once ``record`` is written."""
        others = (r for r in self.jobs if r.job != record.job)
        after = structs.replace(self, jobs=(*others, record))
        if "_index" in self.__dict__:  # the hosts are the same
            after.__dict__["_index"] = self._index
        return after

    def host(self, name: str) -> HostStatus | None:
        return self._index.hosts.get(name)

"""What the page shows, as rows with a key each, and the difference between two sets of rows.

Pure. Only a job's row changes with every step, and no row changes with every heartbeat. So a
difference is as large as what has happened, however many hosts there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import isfinite

from msgspec import Struct, structs

from tmd import __version__
from tmd.core.planning.goodput import step_seconds
from tmd.core.planning.survival import Survival, survival
from tmd.core.values.model import (
    Activity,
    Alert,
    ClusterView,
    Exit,
    HostStatus,
    JobRecord,
    MigrationPlan,
    WorkerStatus,
)
from tmd.core.values.view_checks import ENDED, drain_roles, unfinished

MOST_STANDBYS = 100
"""Standbys of a job that have a row; the job's outlook counts all."""
MOST_LISTED = 16
"""Moves of a plan, and values of other lists, that are shown."""
BEHIND = 2
"""Steps that a rank lags behind before its row says so: ranks report one after the other."""


class ClusterRow(Struct, frozen=True, omit_defaults=True):
    cluster: str
    host: str
    """The host whose daemon serves the page."""
    version: str
    leader: str = ""
    paused: bool = False
    breaker: str = ""
    """Why the breaker is open; empty if it is closed."""
    breaker_at: float = 0.0
    unread: tuple[str, ...] = ()
    unread_jobs: tuple[str, ...] = ()


class HostRow(Struct, frozen=True, omit_defaults=True):
    host: str
    role: str
    ranks: int = 0
    workers: int = 0
    alerts: int = 0
    severity: str = ""
    """The gravest of its alerts."""
    drain_by: str = ""
    drain_at: float = 0.0


class JobRow(Struct, frozen=True, omit_defaults=True):
    job: str
    state: str
    ranks: int
    epoch: int
    survival: Survival
    step: int = 0
    loss: float | None = None
    step_s: float = 0.0
    """Median of the ranks."""
    detail: str = ""
    lost: dict[str, float] = {}
    """Cause -> rank seconds, as the hosts that led have counted them."""


class RankRow(Struct, frozen=True, omit_defaults=True):
    job: str
    rank: int
    host: str
    activity: str
    behind: int = 0
    detail: str = ""


class StandbyRow(Struct, frozen=True, omit_defaults=True):
    job: str
    worker: str
    host: str
    activity: str
    shadows: int | None = None
    rehearsed: bool = False
    unfit: str = ""


class PlanRow(Struct, frozen=True, omit_defaults=True):
    job: str
    id: str
    kind: str
    phase: str
    moves: tuple[tuple[int, str, str], ...]
    """(rank, from host, to host or nothing)."""
    more_moves: int = 0
    cause: str = ""
    reason: str = ""
    policy: str = ""
    outcome: str = ""
    how: str = ""
    choice: tuple[str, ...] = ()
    rollback: str = ""
    detected_at: float = 0.0
    """When the first lost worker was seen to end; 0 if it is not known any more."""
    timeline: tuple[tuple[str, float], ...] = ()
    timings: dict[str, float] = {}


Row = ClusterRow | HostRow | JobRow | RankRow | StandbyRow | PlanRow | Alert
Rows = Mapping[str, Row]


class Difference(Struct, frozen=True):
    """What turns one set of rows into another."""

    rows: dict[str, Row]
    gone: list[str]

    def __bool__(self) -> bool:
        return bool(self.rows or self.gone)


def difference(before: Rows, after: Rows) -> Difference:
    """What has changed from ``before`` to ``after``."""
    changed = {key: row for key, row in after.items() if before.get(key) != row}
    return Difference(changed, [key for key in before if key not in after])


class Ranks(Struct, frozen=True):
    """The latest report of each rank of a job."""

    statuses: tuple[WorkerStatus | None, ...]
    """Indexed by rank. ``None`` stands for a rank without a heartbeat."""

    @property
    def reports(self) -> list[WorkerStatus]:
        return [status for status in self.statuses if status is not None]

    @property
    def step(self) -> int:
        """Step of the foremost rank; 0 without a report."""
        return max((status.step for status in self.reports), default=0)

    @property
    def loss(self) -> float | None:
        """The mean of the finite losses of all ranks. A NaN never equals itself, so the row would
        count as changed each time."""
        losses = [s.loss for s in self.reports if s.loss is not None and isfinite(s.loss)]
        return sum(losses) / len(losses) if losses else None


def ranks_of(view: ClusterView, record: JobRecord) -> Ranks:
    known = view.workers(record.job)
    return Ranks(tuple(known.get(m.worker) for m in record.membership.members))


def rows_of(view: ClusterView, leader: str, cluster: str, host: str) -> Rows:
    """All rows; ``host`` serves them."""
    rows: dict[str, Row] = {
        "cluster": ClusterRow(
            cluster=cluster,
            host=host,
            version=__version__,
            leader=leader.partition("#")[0],
            paused=view.paused,
            breaker=view.breaker.reason if view.breaker.open else "",
            breaker_at=view.breaker.at if view.breaker.open else 0.0,
            unread=view.unread[:MOST_LISTED],
            unread_jobs=view.unread_jobs,
        )
    }
    rows.update((f"host/{row.host}", row) for row in _hosts(view))
    rows.update((f"alert/{a.id}", a) for h in view.hosts for a in h.alerts)
    for record in view.jobs:
        rows.update(_of_job(view, record))
    return rows


def _hosts(view: ClusterView) -> Iterator[HostRow]:
    held = Counter(m.host for record in unfinished(view) for m in record.membership.members)
    roles, drains = drain_roles(view), {d.host: d for d in view.drains}
    statuses = {host.host: host for host in view.hosts}
    for name in sorted({*statuses, *held, *roles, *view.unread}):
        status, drain = statuses.get(name), drains.get(name)
        yield HostRow(
            host=name,
            role=roles.get(name) or _role(status, name in view.unread),
            ranks=held[name],
            workers=0 if status is None else len(status.workers),
            alerts=0 if status is None else len(status.alerts),
            severity="" if status is None else _gravest(status),
            drain_by="" if drain is None else drain.by,
            drain_at=0.0 if drain is None else drain.at,
        )


def _role(status: HostStatus | None, unread: bool) -> str:
    if status is None:
        return "another version" if unread else "silent"
    return "standby" if status.standby else "active"


def _gravest(status: HostStatus) -> str:
    found = [alert.severity for alert in status.alerts]
    return max(found, key=lambda s: s.grade).value if found else ""


def _of_job(view: ClusterView, record: JobRecord) -> Iterator[tuple[str, Row]]:
    job, ranks = record.job, ranks_of(view, record)
    step = ranks.step
    yield (
        f"job/{job}",
        JobRow(
            job=job,
            state=record.state.value,
            ranks=record.world_size,
            epoch=record.membership.epoch,
            survival=survival(view, record),
            step=step,
            loss=ranks.loss,
            step_s=step_seconds(record, view),
            detail=record.detail,
            lost=_lost(view, record),
        ),
    )
    shown = ranks.reports or record.state not in ENDED
    for rank, member in enumerate(record.membership.members if shown else ()):
        row = _rank(job, rank, member.host, ranks.statuses[rank], step)
        adopter = record.membership.adopter_of(rank)
        yield f"rank/{job}/{rank}", structs.replace(row, detail=adopter) if adopter else row
    yield from _standbys(view, record)
    plans = {p.id: p for p in (*record.history, record.plan) if p is not None}
    exits = view.exits(job)
    for plan in plans.values():
        yield f"plan/{job}/{plan.id}", _plan(job, plan, exits)


def _rank(job: str, rank: int, host: str, status: WorkerStatus | None, step: int) -> RankRow:
    if status is None:
        return RankRow(job, rank, host, "no heartbeat")
    behind = step - status.step
    return RankRow(
        job=job,
        rank=rank,
        host=host,
        activity=status.activity.value,
        behind=behind if behind >= BEHIND else 0,
        detail=status.detail,
    )


def _standbys(view: ClusterView, record: JobRecord) -> Iterator[tuple[str, Row]]:
    holding = {m.worker for m in record.membership.members}
    found = [
        (host.host, worker)
        for host in view.hosts
        for worker in host.workers
        if worker.job == record.job and worker.worker not in holding
        if worker.activity is not Activity.LEFT
    ]
    for host, worker in found[:MOST_STANDBYS]:
        yield (
            f"standby/{record.job}/{worker.worker}",
            StandbyRow(
                job=record.job,
                worker=worker.worker,
                host=host,
                activity=worker.activity.value,
                shadows=None if worker.shadow is None else worker.shadow.rank,
                rehearsed=any(v.has_shown for v in worker.rehearsed),
                unfit=worker.unfit,
            ),
        )


def _plan(job: str, plan: MigrationPlan, exits: Mapping[str, Exit]) -> PlanRow:
    moves = [(m.rank, m.leaver.host, m.joiner.host if m.joiner else "") for m in plan.moves]
    return PlanRow(
        job=job,
        id=plan.id,
        kind=plan.kind.value,
        phase=plan.phase.value,
        moves=tuple(moves[:MOST_LISTED]),
        more_moves=max(0, len(moves) - MOST_LISTED),
        cause=plan.cause,
        reason=plan.reason,
        policy=plan.policy,
        outcome=plan.outcome,
        how=plan.how,
        choice=plan.choice[:MOST_LISTED],
        rollback="" if plan.rollback is None else plan.rollback.sentence,
        detected_at=min((exits[w].at for w in plan.dead if w in exits), default=0.0),
        timeline=tuple((mark.phase.value, mark.at) for mark in plan.timeline),
        timings=plan.timings,
    )


def _lost(view: ClusterView, record: JobRecord) -> dict[str, float]:
    lost: Counter[str] = Counter(record.lost)
    for host in view.hosts:
        lost.update(host.lost.get(record.job, {}))
    return dict(lost)

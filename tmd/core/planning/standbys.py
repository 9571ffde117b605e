"""Chooses the standby that takes a rank.

A standby that must not have the rank is refused. The others are ordered by
:class:`CandidateRank`, whose fields are the criteria in order of weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from tmd.core.alerts.findings import BANNED, GRAVE
from tmd.core.planning.migration import PlanFacts
from tmd.core.planning.peers import Communication, commonest, mismatch
from tmd.core.values.model import (
    Activity,
    Alert,
    ClusterView,
    HostStatus,
    JobRecord,
    Member,
    Phase,
    PlanKind,
    Severity,
    Strategy,
    WorkerStatus,
)
from tmd.core.values.shadows import verdict_on, why_unfit

IDLE = 2
"""Distance of a standby that shadows no rank."""
DRAINED = "its host is drained ('tmd undrain {}' gives it back)"
POOL = frozenset({Activity.STANDBY, Activity.SHADOWING, Activity.IN_STEP})


class CandidateRank(NamedTuple):
    """Position of a standby in the order of choice: smaller is earlier."""

    ails: bool
    """Its host is degraded: chosen only after a loss, and only as a last resort."""
    reserve: bool
    """A drain leaves its host in reserve: chosen only after a loss, and only as a last resort."""
    doubted: bool
    """An observing detector has a grave finding about its host."""
    distance: int
    """Distance from the state of a rank: see ``_distance``."""
    crowded: bool
    """Its host holds a rank, so that the loss of the host would cost two."""
    untried: bool
    """No rehearsal has proved that it computes the bits of a rank of the job."""
    last_left: int
    """Position in the job's history of the latest plan that moved a rank off its host, or 0."""
    host: str
    worker: str


class Standby(NamedTuple):
    """A worker that waits for a rank, and its assessment."""

    standing: CandidateRank
    member: Member
    refusal: str = ""
    """Why it gets no rank; empty if it may."""


def line(view: ClusterView, record: JobRecord, facts: PlanFacts) -> list[Standby]:
    """All workers of the job that wait for a rank, best first."""
    holding = {m.host for m in record.membership.members}
    reserve = in_reserve(view)
    drained = drained_for(record, view)
    left = {
        move.leaver.host: number
        for number, plan in enumerate(record.history, start=1)
        if plan.kind is PlanKind.FAILOVER or (plan.policy and not plan.request)
        for move in plan.moves
    }
    members = (facts.status.get(m.worker) for m in record.membership.members)
    common = commonest(status for status in members if status is not None)
    found = []
    for host in view.hosts_of(record.job):
        why = DRAINED.format(host.host) if host.host in drained else _unwelcome(host)
        ails, doubted = _ailment(host) is not None, any(map(_is_grave, host.alerts))
        for w in host.workers:
            if w.job == record.job and _in_pool(w):
                standing = CandidateRank(
                    ails=ails,
                    reserve=host.host in reserve,
                    doubted=doubted,
                    distance=_distance(w, None),
                    crowded=host.host in holding,
                    untried=not any(v.has_shown for v in w.rehearsed),
                    last_left=left.get(host.host, 0),
                    host=host.host,
                    worker=w.worker,
                )
                member = Member(worker=w.worker, host=host.host, address=w.address)
                found.append(Standby(standing, member, why or _refusal(w, record, facts, common)))
    return sorted(found)


def drained_for(record: JobRecord, view: ClusterView) -> set[str]:
    """Hosts that get no rank of the job by an operator's order: also those from which a milder
    drain still has to move a rank."""
    holding = {m.host for m in record.membership.members}
    unserved = {d.host for d in view.drains if d.host in holding and not record.served(d)}
    return barred(view) | unserved


def barred(view: ClusterView) -> set[str]:
    """Hosts that get no rank by an operator's order, not even after a loss."""
    return {d.host for d in view.drains if d.bars}


def dismissed(record: JobRecord, view: ClusterView) -> tuple[str, ...]:
    """The workers without a rank that are to exit, since their hosts are drained with ``leave``."""
    hosts = {request.host for request in view.drains if request.leave}
    workers = {
        w.worker
        for host in view.hosts_of(record.job)
        if host.host in hosts
        for w in host.workers
        if w.job == record.job
    }
    return tuple(sorted(workers - set(record.membership.workers)))


def in_reserve(view: ClusterView) -> set[str]:
    """Hosts that get a rank only if there are no others, by an operator's order."""
    return {d.host for d in view.drains if d.reserve and not d.bars}


def candidates(view: ClusterView, record: JobRecord, facts: PlanFacts) -> list[Member]:
    """Standbys that may take some rank, best first: ``on_hand`` without those fit for none.

    Standbys on sound hosts come first, then those that shadow a rank, since they have the state,
    then those on hosts without a rank, so that a later loss of one host costs one rank.
    """
    ranks = range(record.world_size)
    return [m for m in on_hand(view, record, facts) if any(takes([m], r, facts) for r in ranks)]


def takes(spare: Sequence[Member], rank: int, facts: PlanFacts) -> bool:
    """Whether one of ``spare`` is fit for ``rank``."""
    return any(not unfit_for(facts, member, rank) for member in spare)


def on_hand(view: ClusterView, record: JobRecord, facts: PlanFacts) -> list[Member]:
    """Standbys of the job, in the order of ``candidates``, fit or not.

    Excluded are standbys on hosts that are drained, banned or fatally ill, standbys that an acting
    detector found unfit, standbys of another world size, and those that cannot communicate with the
    members.
    """
    return [s.member for s in line(view, record, facts) if not s.refusal]


def lasting(view: ClusterView, members: Sequence[Member]) -> list[Member]:
    """Those of ``members`` whose hosts need not be vacated soon."""
    reserve = in_reserve(view)
    return [m for m in members if m.host not in reserve and not _ails(view.host(m.host))]


def undrained(view: ClusterView, members: Sequence[Member]) -> list[Member]:
    """Those of ``members`` on hosts without any drain. A softly drained host gets a rank only after
    a loss, since somebody may switch it off."""
    drained = {d.host for d in view.drains}
    return [m for m in members if m.host not in drained]


def _unwelcome(host: HostStatus) -> str:
    """Why ``host`` gets no rank; empty if it may."""
    for alert in host.alerts:
        if alert.code == BANNED:
            return f"its host is banned: {alert.message}"
        if alert.severity is Severity.FATAL and _about_host(alert):
            return f"{alert.code} of {alert.entity} is fatal"
    return ""


def _ailment(host: HostStatus) -> Alert | None:
    """The finding for which a rank would be moved off ``host`` again."""
    return next((a for a in host.alerts if _is_grave(a) and a.strategy is Strategy.ACT), None)


def _ails(host: HostStatus | None) -> bool:
    return host is not None and _ailment(host) is not None


def _is_doubted(host: HostStatus | None) -> bool:
    return host is not None and any(map(_is_grave, host.alerts))


def _is_grave(alert: Alert) -> bool:
    return alert.severity in GRAVE and not alert.job


def _about_host(alert: Alert) -> bool:
    return alert.strategy is Strategy.ACT and not alert.job


def _refusal(
    status: WorkerStatus, record: JobRecord, facts: PlanFacts, common: Communication
) -> str:
    if status.world_size != record.world_size:
        return f"it is for a job of {status.world_size} ranks"
    if found := mismatch(status, common):
        return str(found)
    return "it has ended" if facts.failing(status.worker) else ""


def _in_pool(status: WorkerStatus) -> bool:
    # A joiner of a plan is excluded, whatever its activity.
    return status.activity in POOL and not status.plan


def unfit_for(facts: PlanFacts, member: Member, rank: int) -> str:
    """Why ``member``'s rehearsals forbid ``rank``; empty if they do not."""
    status = facts.status.get(member.worker)
    return "" if status is None else why_unfit(status.rehearsed, rank, facts.role(rank))


def has_rehearsed(status: WorkerStatus, rank: int, facts: PlanFacts) -> bool:
    """Whether it has computed the bits of ``rank``, or of one with the same role."""
    verdict = verdict_on(status.rehearsed, rank, facts.role(rank))
    return verdict is not None and verdict.has_shown


def _distance(status: WorkerStatus, rank: int | None, known: Iterable[WorkerStatus] = ()) -> int:
    """0: has the state of ``rank``; 1: of a replica, as far as known; 2: has none; 3: is getting
    one, or has that of another rank. ``known``: workers that may know the replicas."""
    shadow = status.shadow
    if shadow is None:
        return IDLE
    if shadow.verified is None:
        return 3
    if rank is None or shadow.rank == rank:
        return 0
    return 3 if _builds(status, rank) or _differ(shadow.rank, rank, known) else 1


def _differ(rank: int, other: int, known: Iterable[WorkerStatus]) -> bool:
    """Whether a worker knows that the states of two ranks are not equal."""
    replicas = next((w.replicas for w in known if rank in w.replicas), ())
    return bool(replicas) and other not in replicas


def _builds(status: WorkerStatus, rank: int) -> bool:
    """Whether the worker must be rebuilt for ``rank``."""
    return bool(status.serves) and rank not in status.serves


def assigned(
    ranks: Sequence[int],
    spare: Sequence[Member],
    facts: PlanFacts,
    *,
    idle_first: bool = False,
    late: Collection[str] = (),
) -> dict[int, Member]:
    """A standby for as many ranks as possible, by: host that is not in reserve, nearest state,
    sound host, host without grave findings of observing detectors, rehearsed, no rebuild, order of
    candidates. Unfit standbys are never chosen.

    ``idle_first``: there is time, so standbys that shadow a rank are left to do so.
    ``late``: workers that are chosen only as a last resort.
    """
    found: dict[int, Member] = {}
    sound, reserve = set(lasting(facts.view, spare)), in_reserve(facts.view)
    doubted = {m.host for m in spare if _is_doubted(facts.view.host(m.host))}

    def order(rank: int, member: Member) -> tuple[bool, bool, int, bool, bool, bool, bool]:
        status = facts.status[member.worker]
        distance = _distance(status, rank, facts.status.values())
        return (
            member.worker in late,
            member.host in reserve,
            abs(distance - IDLE) if idle_first else distance,
            member not in sound,
            member.host in doubted,
            not has_rehearsed(status, rank, facts),
            _builds(status, rank),
        )

    def give(rank: int, asked: set[Member]) -> bool:
        """Find a standby for ``rank``, by an augmenting path if all fit ones are taken."""
        may = [m for m in spare if m not in asked and not unfit_for(facts, m, rank)]
        may.sort(key=lambda m: order(rank, m))
        holds = {m: r for r, m in found.items()}
        asked.update(may)
        for member in sorted(may, key=holds.__contains__):
            if member not in holds or give(holds[member], asked):
                found[rank] = member
                return True
        return False

    for rank in ranks:
        give(rank, set())
    return found


def refused_here(record: JobRecord, host: str) -> set[str]:
    """Joiners that failed in planned moves off ``host`` in the current membership."""
    return {
        worker
        for plan in record.history
        if plan.phase is Phase.ABORTED
        and plan.old.epoch == record.membership.epoch
        and any(move.leaver.host == host for move in plan.moves)
        for worker in plan.rejected
    }

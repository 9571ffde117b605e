"""What all schedulers that drain hosts and receive findings have in common.

A scheduler (Slurm, Kubernetes) takes nodes out of service. For each, a drain is requested in the
scheduler's name. Only requests in that name are ever withdrawn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from tmd.core.alerts.findings import BANNED, GRAVE
from tmd.core.planning.free_hosts import is_free
from tmd.core.values.model import Alert, ClusterView, HostStatus, JobState, Strategy
from tmd.core.values.printable import printable
from tmd.core.values.requests import DrainRequest

LONGEST_REASON = 200


class HostRecord(Struct, frozen=True):
    """What was seen of a host in successive views."""

    incarnation: str = ""
    """The run of its daemon; empty while it is silent."""
    silent_since: float = math.inf
    """Monotonic time at which it fell silent; infinite if it reports or was never heard."""
    fit_since: float = math.inf
    """Monotonic time since which this run has been seen without a finding that makes it unfit."""
    findings: Mapping[str, float] = {}
    """Codes that have made it unfit in its latest unfit period, and when (wall clock of the host)
    each was last found."""
    declared: Mapping[str, float] = {}
    """Codes that an operator declared to be over ('' for all), and when (same clock)."""
    drain: str = ""
    """Identifier of the drain request that bars it; empty if none does."""
    barred_since: float = math.inf
    """Monotonic time since which that request has been seen."""
    free_since: float = math.inf
    """Monotonic time since which it has been silent, barred and free in every view."""

    def is_over(self, code: str, now: float, after_s: float) -> bool:
        """Whether the fault ``code`` is taken to be gone, and those found with it.

        A daemon that has just started reports no finding before its detectors have looked, so the
        absence of findings alone shows nothing."""
        if math.isinf(self.fit_since):
            return False
        found = {code: -math.inf, **self.findings}
        declared = all(self._declared_at(code) > at for code, at in found.items())
        return declared or now - self.fit_since >= after_s

    def _declared_at(self, code: str) -> float:
        return max(self.declared.get(code, -math.inf), self.declared.get("", -math.inf))


class HostDrains(Struct, frozen=True):
    """What the drains of a scheduler mean for tmd."""

    drain: tuple[tuple[str, str], ...] = ()
    """Hosts to be drained by tmd, and the requester with the scheduler's reason."""
    undrain: tuple[str, ...] = ()
    """Hosts whose drain request is to be withdrawn."""
    waiting: tuple[str, ...] = ()
    """A sentence about each host that is not drained yet."""
    unseen: tuple[str, ...] = ()
    """Hosts that a request of the scheduler drains, but whose node the scheduler does not show."""


def observed(
    known: Mapping[str, HostRecord],
    view: ClusterView,
    declared: Mapping[str, Mapping[str, float]],
    now: float,
) -> dict[str, HostRecord]:
    """``known`` brought up to date.

    ``declared``: per host, codes that were declared to be over, and when, by its own clock."""
    found, hosts = {}, {h.host: h for h in view.hosts}
    barring = {d.host: d.id for d in view.drains if d.bars}
    for name in known.keys() | hosts.keys() | declared.keys() | barring.keys():
        before, host = known.get(name, HostRecord()), hosts.get(name)
        faults = faults_of(host)
        earlier = {} if faults and not math.isinf(before.fit_since) else before.findings
        same = host is not None and host.incarnation == before.incarnation
        since = before.fit_since if same and not math.isinf(before.fit_since) else now
        fell_silent = now if before.incarnation else before.silent_since
        drain = barring.get(name, "")
        stands = before.barred_since if drain == before.drain else now
        free = bool(drain) and host is None and is_free(view, name)
        found[name] = HostRecord(
            incarnation="" if host is None else host.incarnation,
            silent_since=fell_silent if host is None else math.inf,
            fit_since=math.inf if host is None or faults else since,
            findings=_latest(earlier, ((a.code, a.at) for a in faults)),
            declared=_latest(before.declared, declared.get(name, {}).items()),
            drain=drain,
            barred_since=stands if drain else math.inf,
            free_since=min(before.free_since, now) if free else math.inf,
        )
    return found


def _latest(before: Mapping[str, float], more: Iterable[tuple[str, float]]) -> Mapping[str, float]:
    found = dict(before)
    for code, at in more:
        found[code] = max(at, found.get(code, -math.inf))
    return found


def host_drains(
    view: ClusterView,
    causes: Iterable[tuple[str, str]],
    *,
    by: str,
    hosts_share: float,
    barred: Collection[str] = (),
    leave: bool = False,
) -> HostDrains:
    """What becomes of ``causes``: each host, and why the scheduler drains it, or '' if it does not.

    ``by``: the prefix of requesters by which requests of the scheduler are known. ``hosts_share``:
    its drains stay below this share of the hosts, or below two if that is more. ``barred``: hosts
    that must get no rank. ``leave``: workers of a drained host have to exit. A request of the
    scheduler that allows a rank, or lets workers stay, is made anew.
    """
    requests = {request.host: request for request in view.drains}
    own = {host: request for host, request in requests.items() if request.by.startswith(by)}
    unseen = set(own)
    wanted, undrain = [], []
    for host, cause in causes:
        unseen.discard(host)
        if not cause:
            undrain += [host] if host in own else []
        elif host not in requests or (
            host in own and _is_due(view, own[host], must_bar=host in barred, leave=leave)
        ):
            wanted.append((host, brief(f"{by} {cause}")))
    drain, waiting = _bounded(view, wanted, own.keys() - set(undrain), by, hosts_share)
    return HostDrains(tuple(drain), tuple(undrain), tuple(waiting), tuple(sorted(unseen)))


def _is_due(view: ClusterView, request: DrainRequest, *, must_bar: bool, leave: bool) -> bool:
    """Whether ``request`` has to be made anew."""
    lacks = (must_bar and not request.bars) or (leave and not request.leave)
    return lacks or _came_back(view, request)


def _came_back(view: ClusterView, request: DrainRequest) -> bool:
    """Whether the host got a rank again after a plan had served ``request``, as after a loss."""
    return any(
        record.served(request) and request.host in {m.host for m in record.membership.members}
        for record in view.jobs
        if record.state is JobState.RUNNING
    )


def _bounded(
    view: ClusterView, wanted: list[tuple[str, str]], standing: set[str], by: str, share: float
) -> tuple[list[tuple[str, str]], list[str]]:
    """Those of ``wanted`` for which there is room, and a sentence about each of the rest."""
    most = max(2, math.ceil(share * len(view.hosts))) - 1
    again = [w for w in wanted if w[0] in standing]
    fresh = [w for w in wanted if w[0] not in standing]
    room = max(0, most - len(standing))
    name = by.rstrip(":").capitalize()
    late = [
        f"host {host} is not drained yet: of {len(view.hosts)} hosts no more than {most} are "
        f"drained for {name} at the same time ([breaker] hosts_percent)"
        for host, _ in fresh[room:]
    ]
    return [*again, *fresh[:room]], late


def matching(hosts: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """The host that each of ``names`` means, if any: the one of exactly this name, or else the only
    host with the same first label, provided that one of the two has no domain."""
    known = set(hosts)
    short: dict[str, list[str]] = {}
    for host in known:
        short.setdefault(host.partition(".")[0], []).append(host)
    found = {}
    for name in names:
        first, _, domain = name.partition(".")
        alike = short.get(first, [])
        if name in known:
            found[name] = name
        elif len(alike) == 1 and not (domain and "." in alike[0]):
            found[name] = alike[0]
    return found


def unclear(claims: Mapping[str, Sequence[str]], why: str) -> list[str]:
    """A sentence about each host that several nodes claim to be; ``claims``: their names by host.

    ``why`` ends it, and may name the ``{host}``.
    """
    return [
        f"nodes {', '.join(names)} are left alone: {why.format(host=host)}"
        for host, names in sorted(claims.items())
        if len(names) > 1
    ]


def faults_of(host: HostStatus | None) -> list[Alert]:
    """Findings because of which nothing should be placed on ``host``, gravest first."""
    alerts = () if host is None else host.alerts
    return sorted(filter(_is_about_host, alerts), key=lambda a: (-a.severity.grade, a.code))


def _is_about_host(alert: Alert) -> bool:
    grave = alert.severity in GRAVE and alert.strategy is Strategy.ACT and not alert.job
    return grave or alert.code == BANNED


def brief(text: str) -> str:
    """One line, without double quotes: ``scontrol`` would read one as the end of a reason."""
    line = printable(" ".join(text.split())).replace('"', "'")
    return line[:LONGEST_REASON]

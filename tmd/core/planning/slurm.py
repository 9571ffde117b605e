"""Decides what Slurm and tmd tell each other about hosts: drains one way, findings the other way.

A node that an administrator drains becomes a drain request. A host with a grave finding that may
act, or with a ban, becomes a drained node, so that the scheduler places nothing else there. Each
side takes back only what this module has set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from msgspec import Struct

from tmd.core.alerts.findings import BANNED, GRAVE
from tmd.core.values.model import Alert, ClusterView, HostStatus, JobState, Strategy
from tmd.core.values.printable import printable
from tmd.core.values.requests import DrainRequest
from tmd.core.values.view_checks import holdings

SINFO_FORMAT = "%N|%T|%E"
"""Name, state and reason of a node, for ``sinfo --all --Node --noheader``."""
BY = "slurm:"
"""Beginning of the requester of a drain that stands for the state of a node."""
REASON = "tmd: "
"""Beginning of the reason of a node that was drained for a finding of tmd."""
LONGEST_REASON = 200
DRAINS = frozenset({"drain", "draining", "drained", "fail", "failing"})
FLAGS = "*~#!%$@^-+"
"""Signs that Slurm appends to a state: not responding, powered down, rebooting..."""


class Node(Struct, frozen=True):
    """A node as ``sinfo`` shows it."""

    name: str
    state: str
    reason: str = ""

    @property
    def is_drained(self) -> bool:
        """Whether Slurm places no further job there by order."""
        return self.state in DRAINS

    @property
    def code(self) -> str:
        """Of the finding for which it is drained, if it is drained for one."""
        return self.reason.removeprefix(REASON).partition(":")[0]

    @property
    def is_ours(self) -> bool:
        """Whether it is drained for a finding of tmd."""
        return self.is_drained and self.reason.startswith(REASON)


class HostRecord(Struct, frozen=True):
    """What was seen of a host in successive views."""

    incarnation: str = ""
    """The run of its daemon; empty while it is silent."""
    fit_since: float = math.inf
    """Monotonic time since which this run has been seen without a finding that makes it unfit."""
    findings: Mapping[str, float] = {}
    """Codes that made it unfit since it was fit last, and when (wall clock of the host) each was
    found last."""
    declared: Mapping[str, float] = {}
    """Codes that an operator declared to be over ('' for all), and when (same clock)."""

    def is_over(self, code: str, now: float, after_s: float) -> bool:
        """Whether the fault ``code`` is taken to be gone, and those found with it.

        A daemon that has just started reports no finding before its detectors have looked, so that
        alone shows nothing."""
        if math.isinf(self.fit_since):
            return False
        found = {code: -math.inf, **self.findings}
        declared = all(self._declared_at(code) > at for code, at in found.items())
        return declared or now - self.fit_since >= after_s

    def _declared_at(self, code: str) -> float:
        return max(self.declared.get(code, -math.inf), self.declared.get("", -math.inf))


class Rules(Struct, frozen=True):
    """What an operator has chosen."""

    drain_nodes: bool = True
    """Whether findings drain nodes."""
    resume_after_s: float = 600.0
    """How long one run of a daemon must report no such finding before its node is resumed."""
    hosts_share: float = 0.5
    """Share of the hosts, at least two, that drains of Slurm must not reach."""


class Changes(Struct, frozen=True):
    """What has to be changed so that both sides agree."""

    drain: tuple[tuple[str, str], ...] = ()
    """Hosts to be drained by tmd, and the requester with the reason of the node."""
    undrain: tuple[str, ...] = ()
    """Hosts whose drain request is to be withdrawn."""
    mark: tuple[tuple[str, str], ...] = ()
    """Nodes to be drained in Slurm, and the reason."""
    resume: tuple[str, ...] = ()
    """Nodes whose drain in Slurm is to be taken back."""
    problems: tuple[str, ...] = ()
    """Sentences about what is left as it is and should not be."""


def nodes_of(text: str) -> tuple[Node, ...]:
    """The nodes in the output of ``sinfo``; one in several partitions has a line for each."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if name and state:
            clear = "" if reason == "none" else reason
            found[name] = Node(name, state.rstrip(FLAGS).lower(), clear)
    return tuple(found.values())


def observed(
    known: Mapping[str, HostRecord],
    view: ClusterView,
    declared: Mapping[str, Mapping[str, float]],
    now: float,
) -> dict[str, HostRecord]:
    """``known`` brought up to date.

    ``declared``: per host, codes that were declared to be over, and when, by its own clock."""
    found, hosts = {}, {h.host: h for h in view.hosts}
    for name in known.keys() | hosts.keys() | declared.keys():
        before, host = known.get(name, HostRecord()), hosts.get(name)
        faults = _faults(host)
        earlier = {} if faults and not math.isinf(before.fit_since) else before.findings
        same = host is not None and host.incarnation == before.incarnation
        since = before.fit_since if same and not math.isinf(before.fit_since) else now
        found[name] = HostRecord(
            incarnation="" if host is None else host.incarnation,
            fit_since=math.inf if host is None or faults else since,
            findings=_latest(earlier, ((a.code, a.at) for a in faults)),
            declared=_latest(before.declared, declared.get(name, {}).items()),
        )
    return found


def _latest(before: Mapping[str, float], more: Iterable[tuple[str, float]]) -> Mapping[str, float]:
    found = dict(before)
    for code, at in more:
        found[code] = max(at, found.get(code, -math.inf))
    return found


def changes(
    view: ClusterView,
    nodes: Iterable[Node],
    *,
    records: Mapping[str, HostRecord],
    now: float,
    rules: Rules,
) -> Changes:
    """How ``view`` and ``nodes`` are brought to agree. ``records``: from :func:`observed`.

    No node is drained while the breaker is open: many findings at once have a common cause.
    """
    matched, hosts = _matched(view, nodes), {h.host: h for h in view.hosts}
    wanted, undrain, absent = _requests(view, matched)
    drain, waiting = _bounded(view, wanted, undrain, rules)
    mark, resume = [], []
    for node, host in matched:
        faults, record = _faults(hosts.get(host)), records.get(host, HostRecord())
        if faults and not node.is_drained and rules.drain_nodes and not view.breaker.open:
            mark.append((node.name, _brief(f"{REASON}{faults[0].code}: {faults[0].message}")))
        elif node.is_ours and record.is_over(node.code, now, rules.resume_after_s):
            resume.append(node.name)
    return Changes(tuple(drain), tuple(undrain), tuple(mark), tuple(resume), (*waiting, *absent))


def _requests(
    view: ClusterView, matched: Iterable[tuple[Node, str]]
) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Drains of Slurm that are requests, requests that are not drains any more, and a sentence for
    each request whose node Slurm does not show."""
    requests = {request.host: request for request in view.drains}
    own = {host: request for host, request in requests.items() if request.by.startswith(BY)}
    unseen = set(own)
    wanted, undrain = [], []
    for node, host in matched:
        unseen.discard(host)
        if not node.is_drained or node.is_ours:
            undrain += [host] if host in own else []
        elif host not in requests or (host in own and _came_back(view, own[host])):
            wanted.append((host, _brief(f"{BY} {node.reason or node.state}")))
    absent = [
        f"host {host} stays drained: sinfo shows no node for it ('tmd undrain {host}' gives it "
        "back)"
        for host in sorted(unseen)
    ]
    return wanted, undrain, absent


def _came_back(view: ClusterView, request: DrainRequest) -> bool:
    """Whether the host got a rank again after a plan had served ``request``, as after a loss."""
    return any(
        record.served(request) and request.host in {m.host for m in record.membership.members}
        for record in view.jobs
        if record.state is JobState.RUNNING
    )


def _bounded(
    view: ClusterView, wanted: list[tuple[str, str]], undrain: list[str], rules: Rules
) -> tuple[list[tuple[str, str]], list[str]]:
    """Those of ``wanted`` for which there is room, and a sentence about each other one."""
    standing = {d.host for d in view.drains if d.by.startswith(BY)} - set(undrain)
    most = max(2, math.ceil(rules.hosts_share * len(view.hosts))) - 1
    again = [w for w in wanted if w[0] in standing]
    fresh = [w for w in wanted if w[0] not in standing]
    room = max(0, most - len(standing))
    late = [
        f"host {host} is not drained yet: of {len(view.hosts)} hosts no more than {most} are "
        "drained for Slurm at once, for [breaker] hosts_percent"
        for host, _ in fresh[room:]
    ]
    return [*again, *fresh[:room]], late


def _matched(view: ClusterView, nodes: Iterable[Node]) -> list[tuple[Node, str]]:
    """Nodes with the host of tmd that each one is. A name without a domain means the one that has
    it with a domain, if there is only one."""
    hosts = {h.host for h in view.hosts} | holdings(view).keys() | {d.host for d in view.drains}
    short: dict[str, list[str]] = {}
    for host in hosts:
        short.setdefault(host.partition(".")[0], []).append(host)
    found = []
    for node in nodes:
        first, _, domain = node.name.partition(".")
        alike = short.get(first, [])
        if node.name in hosts:
            found.append((node, node.name))
        elif len(alike) == 1 and not (domain and "." in alike[0]):
            found.append((node, alike[0]))
    return found


def _faults(host: HostStatus | None) -> list[Alert]:
    """Findings for which nothing should be placed on ``host``, gravest first."""
    alerts = () if host is None else host.alerts
    return sorted(filter(_is_about_host, alerts), key=lambda a: (-a.severity.grade, a.code))


def _is_about_host(alert: Alert) -> bool:
    grave = alert.severity in GRAVE and alert.strategy is Strategy.ACT and not alert.job
    return grave or alert.code == BANNED


def _brief(text: str) -> str:
    """One line without what ``scontrol`` would read as a quote."""
    line = printable(" ".join(text.split())).replace('"', "'")
    return line[:LONGEST_REASON]

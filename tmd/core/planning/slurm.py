"""Decides what Slurm and tmd tell each other about hosts: drains one way, findings the other way.

A node that an administrator drains becomes a drain request. A host with a grave finding that may
act, or with a ban, becomes a drained node, so that the scheduler places nothing else there. Each
side takes back only what this module has set.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from tmd.core.alerts.findings import BANNED, GRAVE
from tmd.core.values.model import Alert, ClusterView, HostStatus, Strategy
from tmd.core.values.printable import printable
from tmd.core.values.view_checks import holdings

SINFO_FORMAT = "%N|%T|%E"
"""Name, state and reason of a node, for ``sinfo --Node --noheader``."""
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
    def is_ours(self) -> bool:
        """Whether it is drained for a finding of tmd."""
        return self.is_drained and self.reason.startswith(REASON)


class Steps(Struct, frozen=True):
    """What has to be changed so that both sides agree."""

    drain: tuple[tuple[str, str], ...] = ()
    """Hosts to be drained by tmd, and the requester with the reason of the node."""
    undrain: tuple[str, ...] = ()
    """Hosts whose drain request is to be withdrawn."""
    mark: tuple[tuple[str, str], ...] = ()
    """Nodes to be drained in Slurm, and the reason."""
    resume: tuple[str, ...] = ()
    """Nodes whose drain in Slurm is to be taken back."""


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


def steps(view: ClusterView, nodes: Iterable[Node], *, tell: bool = True) -> Steps:
    """How ``view`` and ``nodes`` are brought to agree. ``tell``: findings drain nodes, unless the
    breaker is open, since many findings at once have a common cause."""
    requests = {request.host: request for request in view.drains}
    drain, undrain, mark, resume = [], [], [], []
    for node, host in _matched(view, nodes):
        request = requests.get(host)
        if node.is_drained and not node.is_ours:
            if request is None:
                drain.append((host, _brief(f"{BY} {node.reason or node.state}")))
        elif request is not None and request.by.startswith(BY):
            undrain.append(host)
        why = _why_unfit(view.host(host))
        if why and not node.is_drained and tell and not view.breaker.open:
            mark.append((node.name, _brief(f"{REASON}{why}")))
        elif node.is_ours and not why and view.host(host) is not None:
            resume.append(node.name)
    return Steps(tuple(drain), tuple(undrain), tuple(mark), tuple(resume))


def _matched(view: ClusterView, nodes: Iterable[Node]) -> list[tuple[Node, str]]:
    """Nodes with the host of tmd that each one is. Slurm's names are often the short ones."""
    hosts = {h.host for h in view.hosts} | holdings(view).keys() | {d.host for d in view.drains}
    short: dict[str, list[str]] = {}
    for host in hosts:
        short.setdefault(host.partition(".")[0], []).append(host)
    found = []
    for node in nodes:
        alike = short.get(node.name.partition(".")[0], [])
        if node.name in hosts:
            found.append((node, node.name))
        elif len(alike) == 1:
            found.append((node, alike[0]))
    return found


def _why_unfit(host: HostStatus | None) -> str:
    """The gravest finding for which nothing should be placed on ``host``; empty if none."""
    alerts = () if host is None else host.alerts
    found = sorted(filter(_is_about_host, alerts), key=lambda a: (-a.severity.grade, a.code))
    return f"{found[0].code}: {found[0].message}" if found else ""


def _is_about_host(alert: Alert) -> bool:
    grave = alert.severity in GRAVE and alert.strategy is Strategy.ACT and not alert.job
    return grave or alert.code == BANNED


def _brief(text: str) -> str:
    """One line without what ``scontrol`` would read as a quote."""
    line = printable(" ".join(text.split())).replace('"', "'")
    return line[:LONGEST_REASON]

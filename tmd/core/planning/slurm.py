"""Decides what Slurm and tmd tell each other about hosts: drains one way, findings the other way.

A node that an administrator drains becomes a drain request. A host with a grave finding that may
act, or with a ban, becomes a drained node, so that the scheduler places nothing else there. Each
side takes back only what this module has set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from tmd.core.planning.scheduler_drains import (
    HostRecord,
    brief,
    faults_of,
    host_drains,
    matching,
    unclear,
)
from tmd.core.values.model import ClusterView
from tmd.core.values.view_checks import known_hosts

SINFO_FORMAT = "%N|%T|%E"
"""Name, state and reason of a node, for ``sinfo --all --Node --noheader``."""
BY = "slurm:"
"""Beginning of the requester of a drain that stands for the state of a node."""
MAY_BE = "each may be host {host}; give the host the name of its node ([host] name)"
REASON = "tmd: "
"""Beginning of the reason of a node that was drained for a finding of tmd."""
DRAINS = frozenset({"drain", "draining", "drained", "fail", "failing"})
FLAGS = "*~#!%$@^-+"
"""Signs that Slurm appends to a state: not responding, powered down, rebooting..."""


class SlurmNode(Struct, frozen=True):
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
        """The code of the finding for which tmd drained the node. Empty if there is none."""
        return self.reason.removeprefix(REASON).partition(":")[0]

    @property
    def is_ours(self) -> bool:
        """Whether it is drained for a finding of tmd."""
        return self.is_drained and self.reason.startswith(REASON)


class SlurmRules(Struct, frozen=True):
    """What an operator has chosen."""

    drain_nodes: bool = True
    """Whether findings drain nodes."""
    resume_after_s: float = 600.0
    """How long one run of a daemon must report no such finding before its node is resumed."""
    hosts_share: float = 0.5
    """Share of the hosts, at least two, that drains of Slurm must not reach."""
    leave: bool = False
    """Whether the workers of a drained host exit."""


class SlurmChanges(Struct, frozen=True):
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


def nodes_of(text: str) -> tuple[SlurmNode, ...]:
    """The nodes in the output of ``sinfo``; one in several partitions has a line for each."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if name and state:
            clear = "" if reason == "none" else reason
            found[name] = SlurmNode(name, state.rstrip(FLAGS).lower(), clear)
    return tuple(found.values())


def changes(
    view: ClusterView,
    nodes: Iterable[SlurmNode],
    *,
    records: Mapping[str, HostRecord],
    now: float,
    rules: SlurmRules,
) -> SlurmChanges:
    """How ``view`` and ``nodes`` are brought to agree. ``records``: from :func:`observed`.

    No node is drained while the breaker is open: many findings at once have a common cause.
    """
    claims = _claims(view, nodes)
    matched = [(claimants[0], host) for host, claimants in claims.items() if len(claimants) == 1]
    causes = [(host, _cause(node)) for node, host in matched]
    share = rules.hosts_share
    found = host_drains(view, causes, by=BY, hosts_share=share, leave=rules.leave)
    absent = tuple(
        f"host {host} stays drained: sinfo shows no node for it ('tmd undrain {host}' gives it "
        "back)"
        for host in found.unseen
        if host not in claims
    )
    hosts = {h.host: h for h in view.hosts}
    mark, resume = [], []
    for node, host in matched:
        faults, record = faults_of(hosts.get(host)), records.get(host, HostRecord())
        if faults and not node.is_drained and rules.drain_nodes and not view.breaker.open:
            mark.append((node.name, brief(f"{REASON}{faults[0].code}: {faults[0].message}")))
        elif node.is_ours and record.is_over(node.code, now, rules.resume_after_s):
            resume.append(node.name)
    names = {host: sorted(node.name for node in of_host) for host, of_host in claims.items()}
    problems = (*unclear(names, MAY_BE), *found.waiting, *absent)
    return SlurmChanges(found.drain, found.undrain, tuple(mark), tuple(resume), problems)


def _cause(node: SlurmNode) -> str:
    """Why an administrator drains ``node``; empty if none does."""
    return (node.reason or node.state) if node.is_drained and not node.is_ours else ""


def _claims(view: ClusterView, nodes: Iterable[SlurmNode]) -> dict[str, list[SlurmNode]]:
    """The nodes that each host is: the one of exactly its name, or all whose names may mean it."""
    listed = tuple(nodes)
    hosts = matching(known_hosts(view), (node.name for node in listed))
    found: dict[str, list[SlurmNode]] = {}
    for node in listed:
        if node.name in hosts:
            found.setdefault(hosts[node.name], []).append(node)
    exact = {node.name: [node] for node in listed}
    return {host: exact.get(host, claimants) for host, claimants in found.items()}

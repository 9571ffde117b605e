"""Decides what Kubernetes and tmd tell each other about hosts.

A cordoned node, and a DrainRequest of NVSentinel, become a drain request. A host that is unfit
because of a finding, or banned, becomes a condition of its node and an Event. No node is ever
cordoned here, and no pod evicted. Nodes without a host of tmd, and those that are not selected, are
left alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256

from msgspec import Struct, structs

from tmd.core.planning.free_hosts import GONE_S, SETTLED_S, is_free, unreadable
from tmd.core.planning.scheduler_drains import (
    HostRecord,
    faults_of,
    host_drains,
    matching,
    unclear,
)
from tmd.core.values.model import Alert, ClusterView, HostStatus
from tmd.core.values.printable import printable
from tmd.core.values.view_checks import jobs_by_host, known_hosts, not_understood

BY = "kubernetes:"
"""Beginning of the requester of a drain that stands for the state of a node."""
CONDITION = "TmdHealthy"
"""Type of the node condition that says whether tmd holds the host of the node fit."""
HOST = "tmd-trainmover/host"
"""Annotation of a node that names its tmd host, if that is not the name of the node."""
TAKEN = f"each is taken for host {{host}}; the annotation {HOST} of a node names its host"
COMPLETE = "DrainComplete"
"""Type of the condition of a DrainRequest for which NVSentinel waits."""
FIT, SILENT = "NoFinding", "NoHeartbeat"
LONGEST_MESSAGE = 500


class Condition(Struct, frozen=True):
    """The condition of a node that this module keeps."""

    status: str
    """``True``, ``False`` or ``Unknown``."""
    reason: str
    message: str
    since: str = ""
    """Time of its last change of status, as the API server gave it; empty if it is to change."""

    @property
    def code(self) -> str:
        """The code of the finding for which the condition is ``False``."""
        return self.message.partition(":")[0]


class KubernetesNode(Struct, frozen=True):
    """A node as the API server shows it."""

    name: str
    uid: str = ""
    cordoned: bool = False
    host: str = ""
    """Its annotation :data:`HOST`."""
    condition: Condition | None = None
    """Its condition :data:`CONDITION`, if it has one."""
    selected: bool = True
    """Whether this operator looks after it. Another one may look after the others."""


class NodeDrain(Struct, frozen=True):
    """A DrainRequest of NVSentinel: free a node, and say when it is free."""

    namespace: str
    name: str
    node: str
    reason: str = ""
    complete: bool = False


class NodeEvent(Struct, frozen=True):
    """An Event about a node."""

    name: str
    """The same for the same change of the same condition, so that it is there once only."""
    warns: bool
    reason: str
    message: str


class NodeChange(Struct, frozen=True):
    """A condition to be set, and the Event that comes with it, if people should see one."""

    node: KubernetesNode
    condition: Condition
    event: NodeEvent | None


class KubernetesRules(Struct, frozen=True):
    """What an operator has chosen."""

    runbook: str
    """Where the runbook is."""
    healthy_after_s: float = 600.0
    """How long one run of a daemon must report no finding before its node is healthy again."""
    hosts_share: float = 0.5
    """Drains of Kubernetes stay below this share of the hosts, or below two if that is more."""
    gone_s: float = GONE_S
    """How long a host without a rank must be silent before it can be drained."""
    settled_s: float = SETTLED_S
    leave: bool = False
    """Whether the workers of a drained host exit."""


class KubernetesChanges(Struct, frozen=True):
    """What has to be changed so that both sides agree."""

    drain: tuple[tuple[str, str], ...] = ()
    """Hosts to be drained by tmd, and the requester with the reason."""
    barred: frozenset[str] = frozenset()
    """Hosts that must get no rank while they are drained: somebody waits for them to be free."""
    undrain: tuple[str, ...] = ()
    """Hosts whose drain request is to be withdrawn."""
    mark: tuple[NodeChange, ...] = ()
    complete: tuple[tuple[NodeDrain, str], ...] = ()
    """DrainRequests that are served, and a sentence that says so."""
    problems: tuple[str, ...] = ()
    """Sentences about what is left as it is and should not be."""


def changes(
    view: ClusterView,
    nodes: Sequence[KubernetesNode],
    requests: Sequence[NodeDrain],
    *,
    records: Mapping[str, HostRecord],
    now: float,
    rules: KubernetesRules,
) -> KubernetesChanges:
    """How the cluster is brought to agree with its nodes and DrainRequests.

    ``records``: from :func:`tmd.core.planning.scheduler_drains.observed`.
    """
    known = known_hosts(view)
    known |= {h for h, r in records.items() if now - r.silent_since >= rules.gone_s}
    claims = _claims(view, nodes, known | _heard(view, records))
    hosts = {names[0]: host for host, names in claims.items() if len(names) == 1}
    own = {n.name: hosts[n.name] for n in nodes if n.selected and n.name in hosts}
    of_node = _requests_of(requests)
    # Whoever waits for a DrainRequest comes first where there is no room for all.
    sure = (n for n in nodes if own.get(n.name) in known)
    urgent = sorted(sure, key=lambda n: n.name not in of_node)
    causes = [(own[n.name], _cause(n, of_node.get(n.name, []))) for n in urgent]
    barred = {host for name, host in own.items() if name in of_node}
    found = host_drains(
        view, causes, by=BY, hosts_share=rules.hosts_share, barred=barred, leave=rules.leave
    )
    waiting = [r for r in requests if not r.complete]
    living = {h.host for h in view.hosts} | {*view.unread} | jobs_by_host(view).keys()
    absent = [host for host in found.unseen if host not in claims]
    return KubernetesChanges(
        drain=found.drain,
        barred=frozenset(host for host, _ in found.drain if host in barred),
        undrain=(*found.undrain, *(host for host in absent if host not in living)),
        mark=_marks(view, nodes, own, records, now, rules),
        complete=tuple(
            (request, f"host {own[request.node]} holds no rank and gets none")
            for request in waiting
            if request.node in own
            and _stays_free(view, own[request.node], records.get(own[request.node]), now, rules)
        ),
        problems=(
            *unclear(claims, TAKEN),
            *found.waiting,
            *_stuck(view, waiting, nodes, own, records),
            *(_absent(host) for host in absent if host in living),
        ),
    )


# --- nodes and hosts ------------------------------------------------------------------------------


def _heard(view: ClusterView, records: Mapping[str, HostRecord]) -> set[str]:
    """Hosts of which something was heard since this operator started."""
    return known_hosts(view) | {h for h, r in records.items() if r.silent_since < math.inf}


def _claims(
    view: ClusterView, nodes: Sequence[KubernetesNode], known: Collection[str]
) -> dict[str, list[str]]:
    """The nodes that belong to each host, selected or not. ``known``: hosts, also of the past.

    A host that was silent before the operator started and holds no rank is not in ``known``. The
    condition of its node shows that there was one, and its name is guessed."""
    names = [n.name for n in nodes if not n.host]
    by_name = {**matching(known, names), **matching(known_hosts(view), names)}
    found: dict[str, list[str]] = {}
    for node in nodes:
        host = node.host if node.host in known else by_name.get(node.name)
        if host is None and node.condition is not None:
            host = node.host or node.name
        if host is not None:
            found.setdefault(host, []).append(node.name)
    return found


def _requests_of(requests: Iterable[NodeDrain]) -> dict[str, list[NodeDrain]]:
    found: dict[str, list[NodeDrain]] = {}
    for request in requests:
        found.setdefault(request.node, []).append(request)
    return found


def _cause(node: KubernetesNode, requests: Sequence[NodeDrain]) -> str:
    """Why Kubernetes drains ``node``; empty if it does not."""
    if requests:
        first = min(requests, key=lambda r: (r.namespace, r.name))
        return f"DrainRequest {first.name}" + (f": {first.reason}" if first.reason else "")
    return f"node {node.name} is cordoned" if node.cordoned else ""


def _absent(host: str) -> str:
    return f"host {host} stays drained: there is no node for it ('tmd undrain {host}' frees it)"


def _stuck(
    view: ClusterView,
    waiting: Iterable[NodeDrain],
    nodes: Iterable[KubernetesNode],
    own: Mapping[str, str],
    records: Mapping[str, HostRecord],
) -> list[str]:
    """A sentence about each DrainRequest that nothing here will complete. ``own``: the hosts of
    the nodes that are looked after."""
    found, others = [], {n.name for n in nodes if not n.selected}
    heard = _heard(view, records)
    for request in waiting:
        what, host = f"DrainRequest {request.namespace}/{request.name}", own.get(request.node)
        if host is None:
            why = (
                "lacks the labels of --selector" if request.node in others else "has no host of tmd"
            )
            found.append(f"{what} is left alone: node {request.node} {why}")
        elif host not in heard:
            found.append(
                f"{what} waits: nothing was heard of host {host} since this operator started, so "
                "it may still hold a rank: start its daemon, or complete the request by hand"
            )
        elif why := _holds_up(view, host):
            found.append(f"{what} waits: {why}")
    return found


def _holds_up(view: ClusterView, host: str) -> str:
    """Why ``host`` does not become free before somebody does something; empty if it may."""
    if unread := unreadable(view, host):
        return not_understood(unread)
    weak = next((d for d in view.drains if d.host == host and not d.bars), None)
    # One of the operator's own that allows ranks is replaced in this look.
    if weak is not None and not weak.by.startswith(BY):
        kind, by = "soft drain" if weak.soft else "drain in reserve", weak.by or "an operator"
        return (
            f"after the {kind} by {by} host {host} may take ranks again "
            f"('tmd drain {host}' keeps it free)"
        )
    if view.paused and host in jobs_by_host(view):
        return f"host {host} holds a rank, and the cluster is paused until 'tmd resume'"
    return ""


# --- from Kubernetes to tmd -----------------------------------------------------------------------


def _stays_free(
    view: ClusterView,
    host: str,
    record: HostRecord | None,
    now: float,
    rules: KubernetesRules,
) -> bool:
    """Whether ``host`` is free, a drain bars it from ranks, also after a loss, and every leader has
    seen that before its latest decision. If a host is silent, Redis may have lost the record of a
    rank that it holds, so it must be free for ``gone_s``."""
    if record is None or now - record.barred_since < rules.settled_s or not is_free(view, host):
        return False
    return view.host(host) is not None or now - record.free_since >= rules.gone_s


# --- from tmd to Kubernetes -----------------------------------------------------------------------


def _marks(
    view: ClusterView,
    nodes: Iterable[KubernetesNode],
    own: Mapping[str, str],
    records: Mapping[str, HostRecord],
    now: float,
    rules: KubernetesRules,
) -> tuple[NodeChange, ...]:
    """The conditions of the nodes in ``own`` that differ. One whose host is of a later release is
    left as it is."""
    statuses = {h.host: h for h in view.hosts}
    found = (
        _mark(node, statuses.get(host), records.get(host), now, rules)
        for node in nodes
        if (host := own.get(node.name)) is not None and host not in view.unread
    )
    return tuple(change for change in found if change is not None)


def _mark(
    node: KubernetesNode,
    host: HostStatus | None,
    record: HostRecord | None,
    now: float,
    rules: KubernetesRules,
) -> NodeChange | None:
    """The condition that ``node`` should get; ``None`` if it has it.

    Once it is ``False`` it stays so while the host is silent, and for a while after the last
    finding: a daemon that has just started has not looked yet."""
    before, faults = node.condition, faults_of(host)
    is_bad = before is not None and before.status == "False"
    if faults:
        what = " ".join(f"{faults[0].code}: {faults[0].message}".split())
        text = f"{printable(what)[:LONGEST_MESSAGE]} ({rules.runbook})"
        wanted = Condition("False", _camel(faults[0].code), text)
    elif host is None:
        if before is None or is_bad or not _is_silent(record, now, rules):
            return None
        wanted = Condition("Unknown", SILENT, "the daemon of tmd on this node is silent")
    elif before is not None and is_bad and not _is_over(before, record, now, rules):
        return None
    else:
        wanted = Condition("True", FIT, "tmd holds the host fit for ranks")
    if before is not None and _same(before, wanted):
        return None
    return _change(node, wanted, faults)


def _is_silent(record: HostRecord | None, now: float, rules: KubernetesRules) -> bool:
    """Whether a host that does not report is silent for good. When Redis or a daemon starts anew,
    hosts are silent for a moment."""
    since = math.inf if record is None else record.silent_since
    return math.isinf(since) or now - since >= rules.gone_s


def _is_over(
    before: Condition, record: HostRecord | None, now: float, rules: KubernetesRules
) -> bool:
    return record is not None and record.is_over(before.code, now, rules.healthy_after_s)


def _same(one: Condition, other: Condition) -> bool:
    return (one.status, one.reason, one.message) == (other.status, other.reason, other.message)


def _camel(code: str) -> str:
    """``nvml.row_remap`` as Kubernetes writes reasons: ``NvmlRowRemap``."""
    words = "".join(c if c.isascii() and c.isalnum() else " " for c in code).split()
    return "".join(word[0].upper() + word[1:] for word in words) or "Finding"


def _change(node: KubernetesNode, wanted: Condition, faults: Sequence[Alert]) -> NodeChange:
    before = node.condition
    if before is not None and before.status == wanted.status:
        wanted = structs.replace(wanted, since=before.since)
    fell = bool(faults) and (before is None or before.reason != wanted.reason)
    rose = wanted.status == "True" and before is not None and before.status == "False"
    if not (fell or rose):
        return NodeChange(node, wanted, None)
    seen = "" if before is None else f"{before.status} {before.reason} {before.since}"
    cause = faults[0].id if faults else ""
    mark = sha256(f"{node.uid} {seen} > {wanted.status} {cause}".encode()).hexdigest()
    # The name of a node may be as long as that of an Event may be.
    name = f"{node.name[:200].rstrip('.-')}.tmd-{mark[:16]}"
    return NodeChange(node, wanted, NodeEvent(name, fell, wanted.reason, wanted.message))

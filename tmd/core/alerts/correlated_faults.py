"""Reduces findings with a cause outside of one host to advice before policies see them.

Pure. Moving a rank off a host does not help against a switch that lost its links, and a driver that
reports the same fault of many GPUs at once is probably wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import NamedTuple

from msgspec import structs

from tmd.core.alerts.breaker import BreakerRules
from tmd.core.alerts.findings import banned_for
from tmd.core.values.model import Alert, ClusterView, HostStatus, Strategy


class _Raised(NamedTuple):
    at: float
    host: str
    id: str


def contained(view: ClusterView, rules: BreakerRules) -> ClusterView:
    """The view for policies.

    Findings of observing detectors are left out. Findings that two hosts raised alike and at once
    become advice, as do recent ones, since another host may not have reported yet. One that has
    got worse counts as raised a second time then.
    """
    shared = _shared(view, rules)
    hosts = tuple(_limited(h, shared, rules) for h in view.hosts)
    # Mostly nothing is left out, and the view has an index of its hosts.
    return view if all(map(is_, hosts, view.hosts)) else structs.replace(view, hosts=hosts)


def _shared(view: ClusterView, rules: BreakerRules) -> dict[str, str]:
    """Findings with a cause outside of one host: id -> reason."""
    alike: dict[tuple[str, str], list[_Raised]] = defaultdict(list)
    for host in view.hosts:
        for alert in host.alerts:
            if not alert.job:
                for at in {alert.at, alert.reached_at}:
                    alike[alert.detector, alert.code].append(_Raised(at, host.host, alert.id))
    return _at_once(alike.values(), rules)


def shared_bans(bans: Iterable[Alert], rules: BreakerRules) -> dict[str, str]:
    """Those of ``bans`` with a cause outside of one host: id -> reason. Two hosts got one at once,
    for the same finding."""
    alike: dict[str, list[_Raised]] = defaultdict(list)
    for each in bans:
        if cause := banned_for(each):
            alike[cause].append(_Raised(each.at, each.host, each.id))
    return _at_once(alike.values(), rules)


def _at_once(groups: Iterable[Sequence[_Raised]], rules: BreakerRules) -> dict[str, str]:
    """Of each group of equal findings those that two hosts raised at once: id -> reason."""
    found: dict[str, str] = {}
    for raises in groups:
        forwards = sorted(raises)
        for one, other in (*_before(forwards), *_before(forwards[::-1])):
            if abs(one.at - other.at) <= rules.same_within_s:
                found[one.id] = f"{other.host} raised the same within {rules.same_within_s:g} s"
    return found


def _before(raises: Sequence[_Raised]) -> Iterator[tuple[_Raised, _Raised]]:
    """Each of ``raises`` with the nearest earlier one of another host."""
    last: _Raised | None = None
    differs: _Raised | None = None
    for one in raises:
        if last is not None and last.host != one.host:
            differs = last
        if differs is not None:
            yield one, differs
        last = one


def _limited(host: HostStatus, shared: dict[str, str], rules: BreakerRules) -> HostStatus:
    if not host.alerts:
        return host
    alerts = []
    for alert in host.alerts:
        if alert.strategy is Strategy.OBSERVE:
            continue
        why = shared.get(alert.id, "")
        # Both times are of the host's own clock, which may have been set back in between.
        if not why and not alert.job and 0 <= host.at - alert.reached_at < rules.settle_s:
            why = f"raised less than {rules.settle_s:g} s ago"
        if why and _acts_on_host(alert):
            evidence = (*alert.evidence, f"advice only: {why}")
            alert = structs.replace(alert, strategy=Strategy.ADVISE, evidence=evidence)
        alerts.append(alert)
    return structs.replace(host, alerts=tuple(alerts))


def _acts_on_host(alert: Alert) -> bool:
    return alert.strategy is Strategy.ACT and not alert.job

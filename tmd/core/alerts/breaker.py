"""The circuit breaker: when too much happens at once, policies move no rank until an operator acts.

Pure. The breaker is a stored value, so that it outlives leaders. Facts in the view open it, and
only 'tmd resume' closes it. Events from before it was closed do not open it again. All times are
wall-clock seconds of their writers, and windows are minutes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from tmd.core.alerts.findings import GRAVE
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.model import (
    ClusterView,
    HostStatus,
    PlanKind,
    Severity,
    Strategy,
    Urgency,
    Verdict,
)


class BreakerRules(Struct, frozen=True):
    """Thresholds of the breaker, and of findings with a cause outside of one host."""

    hosts_share: float = 0.5
    """Share of the hosts, at least two, that must raise a grave finding within the window."""
    window_s: float = 300.0
    moves: int = 6
    """The breaker opens if policies make more moves than this within their window."""
    moves_window_s: float = 3600.0
    same_within_s: float = 60.0
    """A finding raised on two hosts within this time has a cause outside of one host."""
    settle_s: float = 10.0
    """Age at which a finding about a host may be acted on, so that other hosts can report too."""


def tripped(view: ClusterView, rules: BreakerRules) -> str | None:
    """Why the breaker must open now, or ``None``; always ``None`` for an open one."""
    if view.breaker.open:
        return None
    return _too_many_hosts(view, rules) or _too_many_moves(view, rules)


def ahead(view: ClusterView, at: float) -> dict[str, float]:
    """Findings and moves, by id, that would count after a closing at ``at`` although they are in
    ``view`` already, and their times. They must not open the breaker again."""
    found = [event for host in view.hosts for event in _findings(host)]
    return {id_: when for id_, when in (*found, *_moves(view)) if when > at}


def held_back(view: ClusterView, verdict: Verdict) -> str:
    """Why ``verdict`` must not be carried out; empty if it may.

    Operators' drains and replacements of dead workers are always allowed.
    """
    if not view.breaker.open or verdict.request:
        return ""
    if verdict.urgency is Urgency.FAILED and _is_dead(view, verdict):
        return ""
    return f"the circuit breaker is open: {view.breaker.reason}"


def _too_many_hosts(view: ClusterView, rules: BreakerRules) -> str | None:
    raised = {h.host: times for h in view.hosts if (times := _raised(h, view.breaker))}
    enough = max(2, math.ceil(rules.hosts_share * len(view.hosts)))
    for end in sorted({at for times in raised.values() for at in times}):
        since = end - rules.window_s
        at_once = [host for host, times in raised.items() if any(since <= t <= end for t in times)]
        if len(at_once) >= enough:
            names = ", ".join(sorted(at_once))
            return (
                f"{len(at_once)} of {len(view.hosts)} hosts raised grave findings within "
                f"{rules.window_s:g} s: {names}"
            )
    return None


def _raised(host: HostStatus, breaker: Breaker) -> list[float]:
    """Times at which ``host`` raised grave findings about itself since the breaker was closed."""
    return [at for id_, at in _findings(host) if _counts(breaker, id_, at)]


def _findings(host: HostStatus) -> list[tuple[str, float]]:
    """Grave findings of ``host`` about itself, and when they became so."""
    return [
        (alert.id, alert.reached_at)
        for alert in host.alerts
        if alert.severity in GRAVE and alert.strategy is not Strategy.OBSERVE and not alert.job
    ]


def _counts(breaker: Breaker, id_: str, at: float) -> bool:
    """Whether what happened at ``at`` happened since the breaker was closed."""
    return at > max(breaker.at, breaker.counted.get(id_, -math.inf))


def _too_many_moves(view: ClusterView, rules: BreakerRules) -> str | None:
    starts = sorted(at for id_, at in _moves(view) if _counts(view.breaker, id_, at))
    for first, last in zip(starts, starts[rules.moves :], strict=False):
        if last - first <= rules.moves_window_s:
            return (
                f"policies opened more than {rules.moves} migrations within "
                f"{rules.moves_window_s:g} s"
            )
    return None


def _moves(view: ClusterView) -> Sequence[tuple[str, float]]:
    """Planned migrations that policies opened, and when."""
    plans = {
        plan.id: plan
        for record in view.jobs
        for plan in (*record.history, record.plan)
        if plan is not None and plan.kind is PlanKind.PLANNED and plan.policy and not plan.request
    }
    return [(plan.id, plan.timeline[0].at) for plan in plans.values() if plan.timeline]


def _is_dead(view: ClusterView, verdict: Verdict) -> bool:
    """Whether the view shows that the worker has ended."""
    ended = view.exits(verdict.job).get(verdict.worker)
    if ended is not None:
        return ended.code != 0
    holder = verdict.worker.partition("/")[0]
    host = view.host(holder)
    return host is None or any(
        alert.entity == verdict.worker and alert.severity is Severity.FATAL for alert in host.alerts
    )

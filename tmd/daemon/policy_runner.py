"""Runs the policies: what each requests, what of it may be done, and why the rest may not.

The leader and 'tmd policy explain' share this code. Policies are foreign code: one that fails is
skipped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog
from msgspec import Struct, structs

from tmd.core.alerts.breaker import BreakerRules, held_back, tripped
from tmd.core.alerts.correlated_faults import contained
from tmd.core.alerts.findings import GRAVE
from tmd.core.planning.migration import is_live
from tmd.core.planning.planning import steer
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import (
    Alert,
    ClusterView,
    MigrationPlan,
    Severity,
    State,
    Strategy,
    Verdict,
)
from tmd.core.values.view_checks import left_alone
from tmd.daemon.bus import Store
from tmd.plugin import Policy

log = structlog.get_logger("tmd.leader")

OPEN = "breaker.open"


class Ruling(Struct, frozen=True):
    """A verdict and whether it is carried out."""

    verdict: Verdict
    held_back: str = ""
    """Why it is not carried out; empty if it goes to planning."""


def rulings(policies: Sequence[Policy], view: ClusterView, rules: BreakerRules) -> list[Ruling]:
    """The verdicts of all ``policies``, in their order."""
    shown = contained(view, rules)
    verdicts: list[Verdict] = []
    for policy in policies:
        try:
            verdicts += policy.decide(shown)
        except Exception:
            # A foreign policy must not stop the others from deciding.
            log.exception("policy failed, its verdicts are ignored", policy=policy.name)
    return [Ruling(verdict, held_back(view, verdict)) for verdict in verdicts]


class Outlook(Struct, frozen=True):
    """What the leader would do about one job."""

    job: str
    plan: MigrationPlan | None = None
    """The plan that it would open or change."""
    waits: str = ""
    """What it would wait for; empty if nothing."""


def foreseen(
    found: Sequence[Ruling], view: ClusterView, limits: PlanLimits, *, now: float
) -> list[Outlook]:
    """The result of ``found`` in the leader's next turn. Nothing is written."""
    outlooks = []
    for record in view.jobs:
        if why := left_alone(record, view):
            outlooks.append(Outlook(record.job, waits=why))
            continue
        verdicts = [r.verdict for r in found if not r.held_back]
        after = steer(record, view, verdicts, now=now, age=0.0, limits=limits)
        opened = after.plan if after.plan != record.plan else None
        if opened is not None and view.paused and not is_live(record.plan):
            outlooks.append(Outlook(record.job, waits="the cluster is paused: run 'tmd resume'"))
        else:
            outlooks.append(Outlook(record.job, opened, after.detail))
    return outlooks


def withheld(view: ClusterView, rules: BreakerRules) -> list[tuple[Alert, str]]:
    """Grave findings that may not move a rank, and why."""
    seen = {a.id: a for h in contained(view, rules).hosts for a in h.alerts}
    found = []
    for alert in (a for h in view.hosts for a in h.alerts if a.severity in GRAVE):
        shown = seen.get(alert.id)
        if shown is None or shown.strategy is not Strategy.ACT:
            why = f"strategy of {alert.detector} is {alert.strategy}"
            if shown is not None and alert.strategy is Strategy.ACT:
                why = shown.evidence[-1]
            found.append((alert, why))
    return found


async def guarded(view: ClusterView, store: Store, holder: str, rules: BreakerRules) -> ClusterView:
    """``view``, with the circuit breaker opened if ``rules`` require it.

    Raises:
        StoreUnavailable: the breaker could not be opened; nothing may be decided on ``view``.
    """
    reason = tripped(view, rules)
    if reason is None:
        return view
    breaker = Breaker(open=True, reason=reason, at=time.time())
    await store.set_breaker(breaker)
    log.error("circuit breaker opened, policies move no rank", reason=reason)
    await store.publish_alert(breaker_alert(breaker, holder.partition("#")[0]))
    return structs.replace(view, breaker=breaker)


async def resumed(store: Store, by: str, host: str) -> bool:
    """End a pause, and close the circuit breaker, which ``host`` publishes; whether it was open."""
    before = (await store.snapshot()).breaker
    if before.open:
        breaker = Breaker(reason=before.reason, at=time.time(), by=by)
        await store.set_breaker(breaker)
        await store.publish_alert(breaker_alert(breaker, host))
    await store.set_paused(False)
    return before.open


def breaker_alert(breaker: Breaker, host: str) -> Alert:
    """The alert that ``host`` opened or closed the breaker."""
    closed = f"closed by {breaker.by or 'unknown'}: {breaker.reason}"
    return Alert(
        id=f"breaker-{breaker.at:.3f}",
        host=host,
        detector="leader",
        code=OPEN,
        entity="cluster",
        severity=Severity.DEGRADED,
        state=State.RAISED if breaker.open else State.CLEARED,
        message=f"{breaker.reason}; 'tmd resume' closes it" if breaker.open else closed,
        job="",
        strategy=Strategy.ADVISE,
        count=1,
        at=breaker.at,
    )

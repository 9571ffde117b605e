"""Runs the policies: what they request, what may be carried out, and why the rest may not be.

The leader and 'tmd policy explain' share this code. Policies are third-party code: one that
fails is skipped.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence

import structlog
from msgspec import Struct, ValidationError, convert, structs, to_builtins

from tmd.core.alerts.breaker import BreakerRules, ahead, held_back, tripped
from tmd.core.alerts.correlated_faults import contained
from tmd.core.alerts.findings import GRAVE
from tmd.core.planning.migration import is_live
from tmd.core.planning.planning import steer
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.errors import StoreUnavailable
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
from tmd.core.values.printable import valid_text
from tmd.core.values.reasons import in_words
from tmd.core.values.view_checks import left_alone
from tmd.daemon.bus import Store
from tmd.plugin import Policy

log = structlog.get_logger("tmd.leader")

OnFailure = Callable[[Policy, Exception], None]

OPEN = "breaker.open"
CLOCK_SKEW_S = 300.0
"""By how much the clock of Redis may be behind that of the leader which opened the breaker."""


class Ruling(Struct, frozen=True):
    """A verdict and whether it is carried out."""

    verdict: Verdict
    held_back: str = ""
    """Why it is not carried out; empty if it goes to planning."""


def _log_failure(policy: Policy, error: Exception) -> None:
    log.error("policy failed, its verdicts are ignored", policy=policy.name, exc_info=error)


def rulings(
    policies: Sequence[Policy],
    view: ClusterView,
    rules: BreakerRules,
    failed: OnFailure = _log_failure,
) -> list[Ruling]:
    """The verdicts of all ``policies``, in their order.

    ``failed`` is called for each policy that fails: a third-party policy must not stop the others
    from deciding. All verdicts of that policy are ignored.
    """
    shown = contained(view, rules)
    found: list[Ruling] = []
    for policy in policies:
        try:
            found += [Ruling(v, held_back(view, v)) for v in verdicts_of(policy, shown)]
        except Exception as error:
            failed(policy, error)
    return found


def verdicts_of(policy: Policy, view: ClusterView) -> list[Verdict]:
    """What ``policy`` demands of ``view``.

    Raises:
        TypeError: it did not return verdicts, or one has a value of another type than its field.
        Exception: what ``decide`` raises.
    """
    answer: object = policy.decide(view)
    if inspect.iscoroutine(answer):
        answer.close()
        raise TypeError("decide() is async: it must return verdicts at once")
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes):
        raise TypeError(f"decide() returned {answer!r}, which is no list of Verdict")
    return [_checked(each) for each in answer]


def _checked(answer: object) -> Verdict:
    if not isinstance(answer, Verdict):
        raise TypeError(f"decide() returned {answer!r} among its verdicts, which is not a Verdict")
    try:
        verdict = convert(to_builtins(answer), Verdict)
    except (ValidationError, TypeError) as error:
        raise TypeError(f"decide() returned {answer!r}: {in_words(error)}") from None
    # Invalid Unicode could not be encoded with its record.
    return structs.replace(
        verdict, cause=valid_text(verdict.cause), reason=valid_text(verdict.reason)
    )


class Outlook(Struct, frozen=True):
    """What the leader would do about one job."""

    job: str
    plan: MigrationPlan | None = None
    """The plan that it would open or change."""
    waits: str = ""
    """What it would wait for; empty if nothing."""


def foreseen(
    ruled: Sequence[Ruling], view: ClusterView, limits: PlanLimits, *, now: float
) -> list[Outlook]:
    """What follows for each recorded job from the rulings ``ruled``. Deadlines that run and shadows
    are ignored, and nothing is written."""
    outlooks = []
    verdicts = [ruling.verdict for ruling in ruled if not ruling.held_back]
    for record in view.jobs:
        if why := left_alone(record, view):
            outlooks.append(Outlook(record.job, waits=why))
            continue
        after = steer(record, view, verdicts, now=now, age=0.0, limits=limits)
        opened = after.plan if after.plan != record.plan else None
        if opened is not None and view.paused and not is_live(record.plan):
            outlooks.append(Outlook(record.job, waits="the cluster is paused: run 'tmd resume'"))
        else:
            outlooks.append(Outlook(record.job, opened, after.detail))
    return outlooks


def withheld(view: ClusterView, rules: BreakerRules) -> list[tuple[Alert, str]]:
    """Alerts that are grave but on which no policy may act, and why."""
    seen = {a.id: a for h in contained(view, rules).hosts for a in h.alerts}
    found = []
    for alert in (a for h in view.hosts for a in h.alerts if a.severity in GRAVE):
        shown = seen.get(alert.id)
        if shown is None or shown.strategy is not Strategy.ACT:
            why = f"strategy of {alert.detector} is {alert.strategy}"
            if shown is not None and alert.strategy is Strategy.ACT:
                why = shown.evidence[-1]  # `contained` appends the reason
            found.append((alert, why))
    return found


class Fuse:
    """Opens the circuit breaker if its rules require that.

    ``holder``: of the leader's lease, ``host#…``.
    """

    def __init__(self, store: Store, holder: str) -> None:
        self._store = store
        self._host = holder.partition("#")[0]
        self._published: Breaker | None = None
        """The open breaker whose alert this leader has published last."""
        self._problem = ""
        """Why the latest alert could not be published."""

    async def look(self, view: ClusterView, rules: BreakerRules) -> ClusterView:
        """``view``, with the breaker opened if ``rules`` require it.

        Raises:
            StoreUnavailable: the breaker could not be opened; nothing may be decided on ``view``.
        """
        if not view.breaker.open:
            self._problem = ""
        if not view.breaker.open and (reason := tripped(view, rules)) is not None:
            breaker = Breaker(open=True, reason=reason, at=time.time())
            await self._store.set_breaker(breaker)
            log.error("circuit breaker opened, policies move no rank", reason=reason)
            view = structs.replace(view, breaker=breaker)
        if view.breaker.open and view.breaker != self._published:
            # A former leader may have failed before its alert. The store takes each only once.
            await self._publish(view.breaker)
        return view

    async def _publish(self, breaker: Breaker) -> None:
        """Publish the alert of an open breaker. If that fails, losses are replaced all the same."""
        try:
            await self._store.publish_alert(
                breaker_alert(breaker, self._host, opened_at=breaker.at)
            )
        except StoreUnavailable as error:
            if (problem := str(error)) != self._problem:
                log.warning("the alert of the circuit breaker is not published", error=problem)
            self._problem = problem
        else:
            self._published, self._problem = breaker, ""


async def end_pause(store: Store, by: str, host: str) -> bool:
    """End a pause and close the circuit breaker; returns whether the breaker was open.

    ``host``: the host that the alert names.
    """
    view = await store.snapshot()
    before = view.breaker
    if before.open:
        # Findings and plans since then count again. An operator's clock may be wrong. That of Redis
        # may be a little behind those of the hosts, whose findings have opened the breaker.
        clock = await store.clock()
        at = max(clock, min(before.at, clock + CLOCK_SKEW_S))
        breaker = Breaker(open=False, reason=before.reason, at=at, by=by, counted=ahead(view, at))
        await store.publish_alert(breaker_alert(breaker, host, opened_at=before.at))
        await store.set_breaker(breaker)
    await store.set_paused(False)
    return before.open


def breaker_alert(breaker: Breaker, host: str, *, opened_at: float) -> Alert:
    """The alert that ``host`` opened or closed the breaker. Both have the id of ``opened_at``."""
    opened = f"circuit breaker opened: {breaker.reason}; 'tmd resume' closes it"
    closed = f"circuit breaker closed by {breaker.by or 'unknown'}: {breaker.reason}"
    return Alert(
        id=f"breaker-{opened_at:.3f}",
        host=host,
        detector="leader",
        code=OPEN,
        entity="cluster",
        severity=Severity.DEGRADED,
        state=State.RAISED if breaker.open else State.CLEARED,
        message=opened if breaker.open else closed,
        job="",
        strategy=Strategy.ADVISE,
        count=1,
        at=breaker.at,
    )

"""Runs the policies: what they request, what may be carried out, and why the rest may not be.

The leader and 'tmd policy explain' share this code. Policies are third-party code: one that
fails is skipped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import structlog
from msgspec import Struct, ValidationError, convert, structs, to_builtins

from tmd.core.alerts.breaker import BreakerRules, held_back
from tmd.core.alerts.correlated_faults import contained
from tmd.core.alerts.findings import GRAVE
from tmd.core.planning.planning import steer
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import (
    Alert,
    ClusterView,
    MigrationPlan,
    Strategy,
    Verdict,
)
from tmd.core.values.printable import valid_text
from tmd.core.values.reasons import in_words
from tmd.core.values.view_checks import left_alone
from tmd.daemon.foreign_code import contained_exit
from tmd.plugin import Policy

log = structlog.get_logger("tmd.leader")

OnFailure = Callable[[Policy, Exception], None]
PolicyAnswer = Callable[[], list[Verdict]]
"""Returns the verdicts of a policy, or raises why there are none."""
AskPolicies = Callable[[Sequence[Policy], ClusterView], Iterable[PolicyAnswer]]
"""Returns an answer of each policy, in their order."""


def verdicts_of(policy: Policy, view: ClusterView) -> list[Verdict]:
    """What ``policy`` demands of ``view``.

    Raises:
        TypeError: it did not return verdicts, or one has a value of another type than its field.
        Exception: what ``decide`` raises, or ``PluginExit`` if that would end the process.
    """
    with contained_exit():
        return _verdicts(policy.decide(view))


def _verdicts(answer: object) -> list[Verdict]:
    if inspect.iscoroutine(answer):
        answer.close()
        raise TypeError("decide() is async: it must return verdicts at once")
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes):
        raise TypeError(f"decide() returned {answer!r}, which is no list of Verdict")
    return [_checked(each) for each in answer]


def ask_each(policies: Sequence[Policy], view: ClusterView) -> Iterator[PolicyAnswer]:
    """Ask one policy after the other, however long each takes."""
    for policy in policies:
        yield partial(verdicts_of, policy, view)


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
    ask: AskPolicies = ask_each,
) -> list[Ruling]:
    """The verdicts of all ``policies``, in their order, got by ``ask``.

    ``failed`` is called for each policy that fails: a third-party policy must not stop the others
    from deciding. All verdicts of that policy are ignored.
    """
    shown = contained(view, rules)
    found: list[Ruling] = []
    for policy, answer in zip(policies, ask(policies, shown), strict=True):
        try:
            found += [Ruling(v, held_back(view, v)) for v in answer()]
        except Exception as error:
            failed(policy, error)
    return found


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

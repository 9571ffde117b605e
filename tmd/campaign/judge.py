"""Compares the expectations of a scenario with the observations. Pure functions on values."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from msgspec import Struct

from tmd.campaign.scenario import Expected, Scenario
from tmd.core.values.model import Alert, MigrationPlan, Phase, PlanKind, State


class Observed(Struct, frozen=True):
    """Observations of one scenario. Times are wall-clock, for people and for durations."""

    scenario: str
    kinds: tuple[str, ...] = ()
    fired: tuple[float, ...] = ()
    """Times at which the faults had happened."""
    trouble: str = ""
    """Failure of the scenario itself: a fault that did not fire, or a timeout."""
    plans: tuple[MigrationPlan, ...] = ()
    """Final plans, in order."""
    alerts: tuple[Alert, ...] = ()
    """Alerts raised in the scenario."""
    epochs: tuple[int, int] = (0, 0)
    """Epochs before and after."""
    steps: tuple[int, int] = (0, 0)
    repeated: int = 0
    noticed: dict[str, float] = {}
    """By plan: the time at which the host noticed the worker's end."""
    seconds: float = 0.0
    skipped: str = ""
    """Why this machine cannot play it."""


def word(plan: MigrationPlan) -> str:
    """A plan in the notation of scenario files."""
    return f"{plan.kind} {plan.phase}"


def expected(scenario: Scenario, plans: Iterable[MigrationPlan]) -> Expected:
    """The expectation that applies. ``plans``: final so far; the phases of a dropped plan show
    whether the vote had switched to it before."""
    dropped = (p for p in plans if p.kind is PlanKind.PLANNED and p.phase is Phase.ABORTED)
    voted = any(mark.phase is Phase.SWITCH for plan in dropped for mark in plan.timeline)
    return scenario.voted if voted and scenario.voted is not None else scenario.expect


def deviations(scenario: Scenario, seen: Observed) -> list[str]:
    """All differences from the expectation, in sentences; none for a skipped scenario."""
    if seen.skipped:
        return []
    expect = expected(scenario, seen.plans)
    found = [seen.trouble] if seen.trouble else []
    unfired = len(scenario.faults) - len(seen.fired)
    if unfired and not seen.trouble:
        found.append(f"{unfired} of {len(scenario.faults)} faults did not fire")
    found += _of_plans(expect, seen.plans)
    found += _of_alerts(expect, seen.alerts)
    if seen.repeated > expect.repeated:
        found.append(f"{seen.repeated} steps were run again, at most {expect.repeated} may be")
    return found


def _of_plans(expect: Expected, plans: Sequence[MigrationPlan]) -> list[str]:
    words = [word(plan) for plan in plans]
    found = []
    if not _fits(words, expect.plans, expect.may):
        found.append(
            f"plans: {_listed(words)} instead of {_listed(expect.plans)}{_outcomes(plans)}"
        )
    moved = {m.rank for p in plans if p.phase is Phase.DONE for m in p.moves}
    if expect.moved is not None and moved != set(expect.moved):
        found.append(f"ranks moved: {sorted(moved)} instead of {sorted(expect.moved)}")
    done = [p for p in plans if p.kind is PlanKind.PLANNED and p.phase is Phase.DONE]
    found += [
        f"plan {p.id} was done by '{p.how}' instead of '{expect.how}'"
        for p in done
        if expect.how not in p.how
    ]
    if expect.outcome and not any(expect.outcome in p.outcome for p in plans):
        found.append(f"no plan ended with the words '{expect.outcome}'{_outcomes(plans)}")
    return found


def _fits(words: Sequence[str], wanted: Sequence[str], may: Sequence[str]) -> bool:
    """Whether ``words`` are those wanted, in order, with any number of ``may`` between."""
    rest = list(wanted)
    for each in words:
        if rest and each == rest[0]:
            rest.pop(0)
        elif each not in may:
            return False
    return not rest


def _of_alerts(expect: Expected, alerts: Iterable[Alert]) -> list[str]:
    raised = {a.code: a for a in alerts if a.state is State.RAISED}
    missing = sorted(set(expect.alerts) - raised.keys())
    strange = sorted(raised.keys() - {*expect.alerts, *expect.may_alert})
    found = [f"alerts that were not raised: {', '.join(missing)}"] if missing else []
    if strange:
        listed = "; ".join(f"{c} of {raised[c].entity}: {raised[c].message}" for c in strange)
        found.append(f"unexpected alerts: {listed}")
    return found


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words) or "none"


def _outcomes(plans: Iterable[MigrationPlan]) -> str:
    listed = [f"{p.id}: {p.cause}: {p.outcome or p.reason}" for p in plans]
    return f" ({'; '.join(listed)})" if listed else ""


def decided_s(seen: Observed) -> float | None:
    """The time in seconds from the last fault to the first plan that was stored after it."""
    starts = [p.timeline[0].at for p in seen.plans if p.timeline]
    after = [at for at in starts if seen.fired and at >= seen.fired[-1]]
    return min(after) - seen.fired[-1] if after else None


def late_decisions(scenario: Scenario, seen: Sequence[Observed], lease_s: float) -> list[str]:
    """Deviation of the repeats' median from the scenario's bound."""
    bound = scenario.expect.decided_within_leases * lease_s
    times = [t for s in seen if (t := decided_s(s)) is not None]
    if not bound or not times or statistics.median(times) <= bound:
        return []
    middle = statistics.median(times)
    return [f"decided after {middle:.2f} s (median of {len(times)}), {bound:g} s are allowed"]

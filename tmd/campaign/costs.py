"""Costs of the faults of a scenario, split into the parts of a recovery."""

from __future__ import annotations

from msgspec import Struct

from tmd.campaign.judge import Observed
from tmd.core.values.model import MigrationPlan, Phase, PlanKind
from tmd.demo.report import DemoEvent, DemoTrace, events_of


class Cost(Struct, frozen=True):
    """The cost of one plan."""

    plan: str
    kind: str
    cause: str
    lost_s: float
    """Downtime of a failover, pause of a planned move; beyond one step."""
    split: dict[str, float]
    repeated: int


def costs_of(trace: DemoTrace, seen: Observed) -> tuple[Cost, ...]:
    """The cost of each plan of ``seen``, where the trace shows it."""
    found = []
    for plan in seen.plans:
        before = [at for at in seen.fired if plan.timeline and at <= plan.timeline[0].at]
        if not before or not _measurable(trace, plan):
            continue
        events = events_of(trace, [plan], {plan.id: before[-1]}, seen.noticed)
        if events:
            found.append(_cost(plan, events[0]))
    return tuple(found)


def _cost(plan: MigrationPlan, event: DemoEvent) -> Cost:
    lost = event.downtime_s if event.pause_s is None else event.pause_s
    return Cost(
        plan=plan.id,
        kind=event.kind,
        cause=event.cause,
        lost_s=lost or 0.0,
        split=event.split,
        repeated=event.repeated_steps,
    )


def _measurable(trace: DemoTrace, plan: MigrationPlan) -> bool:
    """Whether a rank stayed, with commits before and after."""
    needed = Phase.READY if plan.kind is PlanKind.PLANNED else Phase.SYNC
    moved = {m.rank for m in plan.moves}
    stayers = [rank for rank in trace.ranks if rank not in moved]
    if plan.phase is not Phase.DONE or not moved or not stayers:
        return False
    if needed not in {mark.phase for mark in plan.timeline}:
        return False
    for rank in stayers:
        epochs = [line["epoch"] for line in trace.of_rank(rank)]
        if not epochs or epochs[0] >= plan.new.epoch or epochs[-1] < plan.new.epoch:
            return False
    return True

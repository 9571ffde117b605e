"""Plans, alerts and observations, to judge."""

from __future__ import annotations

from tests import values
from tmd.campaign.judge import Observed
from tmd.core.values.model import (
    Alert,
    Mark,
    Member,
    Membership,
    MigrationPlan,
    Move,
    Phase,
    PlanKind,
    State,
    Strategy,
)

MEMBERS = tuple(Member(f"h{n}/job/0.{n}", f"h{n}", "") for n in range(3))


def plan(what: str, *ranks: int, at: float = 10.0, outcome: str = "") -> MigrationPlan:
    """``what`` as scenario files say it."""
    kind, phase = what.split()
    return values.plan(
        Membership(1, MEMBERS),
        id=f"p{at:g}",
        kind=PlanKind(kind),
        phase=Phase(phase),
        moves=tuple(Move(rank, MEMBERS[rank]) for rank in ranks),
        new=Membership(2, MEMBERS),
        cause="trainer.exited",
        reason="it ended",
        timeline=(Mark(Phase.RECOVER, at),),
        outcome=outcome,
    )


def alert(code: str, state: State = State.RAISED) -> Alert:
    return values.alert(
        id=code,
        host="h0",
        detector=code.partition(".")[0],
        code=code,
        state=state,
        message="so it is",
        strategy=Strategy.ACT,
    )


def observed(*plans: MigrationPlan, codes: tuple[str, ...] = (), **more) -> Observed:
    given = {"scenario": "one", "kinds": ("process.kill",), "fired": (9.0,), **more}
    return Observed(plans=plans, alerts=tuple(alert(c) for c in codes), **given)

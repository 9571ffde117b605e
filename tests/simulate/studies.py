"""A small job and costs that are easy to reckon with."""

from __future__ import annotations

from msgspec import structs

from tmd.config import Settings
from tmd.simulate.compare import Study, outcome, rules_of
from tmd.simulate.costs import Costs
from tmd.simulate.values import HOUR, Fault, Job, Outcome, RecoveryMethod, RecoverySetup

COSTS = Costs(
    step_s=10.0,
    restart_s=400.0,
    save_s=0.0,
    warm_s=20.0,
    hot_s=5.0,
    move_s=2.0,
    prepare_s=100.0,
    resize_s=50.0,
    snapshot_s=0.0,
    hot_share=0.0,
    rejoin_s=200.0,
)
FREE = Costs(step_s=10.0, **dict.fromkeys(Costs.__struct_fields__[1:], 0.0))
RULES = rules_of(Settings(), announced=True)


def study(
    hosts: int = 4,
    *,
    replica_hosts: int = 1,
    hours: float = 100.0,
    costs: Costs = COSTS,
    checkpoint_s: float = 0.0,
    snapshot_steps: int = 10,
) -> Study:
    job = Job(hosts, replica_hosts, hours)
    return Study(job, costs, RULES, checkpoint_s, snapshot_steps)


def fault(at_s: float, place: int = 0, repair_h: float = 1000.0, **changes: object) -> Fault:
    """A host is lost, without a warning unless ``changes`` says so."""
    plain = Fault(at_s, place, "c", repair_s=repair_h * HOUR, notice_s=HOUR)
    return structs.replace(plain, **changes)


def played(
    method: RecoveryMethod, standbys: int, *faults: Fault, asked: Study | None = None
) -> Outcome:
    """What becomes of a small job, or of the one in ``asked``."""
    trace = sorted(faults, key=lambda f: f.at_s)
    return outcome(asked or study(), trace, RecoverySetup(method, standbys))


def lost_s(one: Outcome) -> dict[str, float]:
    """Lost seconds by cause, without rounding errors."""
    return {cause: round(hours * HOUR, 6) for cause, hours in one.lost.items()}

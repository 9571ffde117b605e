"""Tables and sentences for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tmd.cli import output
from tmd.simulate.costs import Sourced
from tmd.simulate.values import Cause, Outcome

if TYPE_CHECKING:
    from rich.table import Table

SHORT = {
    Cause.PLANNED_MOVE: "move",
    Cause.INTERRUPTED_STEP: "step",
    Cause.FAILOVER: "failover",
    Cause.HOLD: "hold",
    Cause.REPEATED_STEPS: "repeated",
    Cause.RESTART: "restart",
    Cause.RESIZE: "resize",
    Cause.SHRUNK: "shrunk",
    Cause.CHECKPOINT: "checkpoint",
    Cause.SNAPSHOT: "snapshot",
    Cause.SHADOW: "shadow",
}


def outcomes(found: Sequence[Outcome], hosts: int) -> Table:
    """A row for each setup."""
    head = ("setup", "goodput", "per host paid", "lost hours", "by cause")
    made = output.table(head, title="Hours of the job")
    for one in found:
        output.add(
            made,
            one.setup.name,
            f"{one.goodput:.2%}",
            f"{per_host(one, hosts):.2%}",
            f"{one.hours - one.useful:.2f}",
            ", ".join(_causes(one)),
        )
    made.columns[0].no_wrap = True
    return made


def per_host(one: Outcome, hosts: int) -> float:
    """Goodput, spread over all hosts that are paid."""
    return one.goodput * hosts / (hosts + one.setup.standbys)


def _causes(one: Outcome) -> Iterator[str]:
    """Lost hours by cause, the greatest first."""
    for cause, hours in sorted(one.lost.items(), key=lambda item: -item[1]):
        yield f"{SHORT[Cause(cause)]} {hours:.2f}"


def say_costs(sourced: Sourced) -> None:
    """Print the costs by source."""
    by_source: dict[str, list[str]] = {}
    for name in sourced.costs.__struct_fields__:
        shown = f"{name} {getattr(sourced.costs, name):g}"
        by_source.setdefault(sourced.sources[name], []).append(shown)
    output.say("Costs in seconds:")
    for source, names in by_source.items():
        output.say(f"  {', '.join(names)}: {source}")

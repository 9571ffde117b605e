"""What a record keeps of its final plans."""

from __future__ import annotations

from collections.abc import Sequence

from tmd.core.values.model import MigrationPlan, Phase

HISTORY = 50
"""Plans that a record keeps, and of the older ones at most as many that served a request."""


def shortened(plans: Sequence[MigrationPlan]) -> tuple[MigrationPlan, ...]:
    """The newest of ``plans``, which are in the order of their ends, after those older ones that
    served the latest request for a host: that request may stand for as long as the job runs."""
    latest = {
        move.leaver.host: plan.id
        for plan in plans
        if plan.request and plan.phase is Phase.DONE
        for move in plan.moves
    }
    served = set(latest.values())
    older = [plan for plan in plans[:-HISTORY] if plan.id in served]
    return (*older[-HISTORY:], *plans[-HISTORY:])

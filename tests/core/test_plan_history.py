"""What a record keeps of its final plans."""

from __future__ import annotations

from tests import values
from tmd.core.planning.plan_history import HISTORY, shortened
from tmd.core.values.model import MigrationPlan, Move, Phase

MEMBERSHIP = values.record("h0", "h1").membership


def plan(number, host="h0", **changes):
    moves = (Move(rank=0, leaver=values.member(host)),)
    return values.plan(MEMBERSHIP, id=f"job-{number}", moves=moves, **changes)


def after(*plans):
    """The history once each of ``plans`` has ended, one after the other."""
    history: tuple[MigrationPlan, ...] = ()
    for one in plans:
        history = shortened((*history, one))
    return history


def ids(history):
    return [p.id for p in history]


def test_the_newest_plans_are_kept():
    plans = [plan(n) for n in range(HISTORY + 5)]

    assert after(*plans) == tuple(plans[5:])


def test_a_plan_that_served_the_latest_request_for_a_host_is_kept():
    """The request may stand on: the host would be drained once more."""
    first = [plan(0, "h1", request="r"), plan(1, "h2", request="q")]
    later = [plan(n, phase=Phase.ABORTED) for n in range(2, 3 * HISTORY)]

    assert ids(after(*first, *later))[:3] == ["job-0", "job-1", f"job-{2 * HISTORY}"]


def test_a_plan_for_an_earlier_request_or_one_that_was_not_served_is_not_kept():
    first = [
        plan(0, "h1", request="r"),
        plan(1, "h2", request="q", phase=Phase.ABORTED),
        plan(2, "h1", request="again"),
    ]
    later = [plan(n) for n in range(3, HISTORY + 5)]

    assert ids(after(*first, *later))[:2] == ["job-2", "job-5"]


def test_the_history_is_bounded_however_many_hosts_were_drained():
    plans = [plan(n, f"h{n}", request=f"r{n}") for n in range(5 * HISTORY)]

    assert after(*plans) == tuple(plans[-2 * HISTORY :])

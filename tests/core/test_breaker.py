"""The circuit breaker."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.plugins.clusters import RECORD, cluster, finding, host, planned
from tests.values import worker
from tmd.core.alerts.breaker import BreakerRules, ahead, held_back, tripped
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.model import (
    ClusterView,
    Exit,
    HostStatus,
    Mark,
    Phase,
    PlanKind,
    Severity,
    Strategy,
    Urgency,
    Verdict,
)

RULES = BreakerRules()
OPEN = Breaker(open=True, reason="too much", at=50.0)


def hosts(count, *raising, **changes):
    """``count`` hosts; those in ``raising`` have raised a finding at that time."""
    found = []
    for number in range(count):
        times = [at for which, at in raising if which == number]
        alerts = (finding(f"h{number}", at=times[0], **changes),) if times else ()
        found.append(HostStatus(f"h{number}", "i", alerts=alerts, at=1000.0))
    return ClusterView(hosts=tuple(found))


# --- when it opens --------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "enough"), [(2, 2), (3, 2), (4, 2), (5, 3), (8, 4), (9, 5)])
def test_half_of_the_hosts_at_once_are_too_many(count, enough):
    raising = [(n, 100.0 + n) for n in range(enough)]

    assert tripped(hosts(count, *raising), RULES) is not None
    assert tripped(hosts(count, *raising[:-1]), RULES) is None


def test_one_after_the_other_is_not_at_once():
    inside = hosts(4, (0, 100.0), (1, 400.0))
    outside = hosts(4, (0, 100.0), (1, 400.1))

    assert "h0, h1" in (tripped(inside, RULES) or "")
    assert tripped(outside, RULES) is None


@pytest.mark.parametrize(
    "changes",
    [{"severity": Severity.WARNING}, {"strategy": Strategy.OBSERVE}, {"job": "job"}],
    ids=["warning", "observe", "about a worker"],
)
def test_findings_that_move_no_rank_do_not_open_the_breaker(changes):
    """A job that crashes ends all its workers, which the failover handles."""
    assert tripped(hosts(2, (0, 100.0), (1, 100.0), **changes), RULES) is None


def test_a_finding_counts_from_when_it_became_grave():
    """It was a warning before, on each host at another time."""
    late = hosts(4, (0, 100.0), (1, 5000.0), worse_at=9000.0)
    one = structs.replace(
        late, hosts=(late.hosts[0], *hosts(4, (1, 5000.0), worse_at=90_000.0).hosts[1:])
    )
    closed = structs.replace(late, breaker=Breaker(at=8000.0))

    assert tripped(late, RULES) is not None
    assert tripped(one, RULES) is None
    assert tripped(closed, RULES) is not None


def moving(*starts, **changes):
    plans = tuple(
        planned(number, timeline=(Mark(Phase.PREPARE, at),), **changes)
        for number, at in enumerate(starts)
    )
    return ClusterView(jobs=(structs.replace(RECORD, history=plans, plan=plans[-1]),))


def test_more_moves_by_policies_than_allowed_open_it():
    six, seven = [100.0 + n for n in range(6)], [100.0 + n for n in range(7)]

    assert tripped(moving(*six), RULES) is None
    assert "more than 6" in (tripped(moving(*seven), RULES) or "")
    assert tripped(moving(*six, 100.0 + 3601), RULES) is None


@pytest.mark.parametrize(
    "changes",
    [{"request": "r"}, {"kind": PlanKind.FAILOVER}, {"policy": ""}],
    ids=["operator", "failover", "nobody's"],
)
def test_other_migrations_do_not_count(changes):
    assert tripped(moving(*range(100, 140), **changes), RULES) is None


def test_events_before_the_closing_do_not_open_it_again():
    closed = Breaker(at=200.0)
    old = structs.replace(hosts(2, (0, 100.0), (1, 110.0)), breaker=closed)
    new = structs.replace(hosts(2, (0, 210.0), (1, 220.0)), breaker=closed)

    assert tripped(old, RULES) is None
    assert tripped(new, RULES) is not None


def test_what_bears_a_later_time_than_the_closing_counts_once():
    """The clock of its host, or of the leader, is ahead. The same finding counts again once it has
    got worse."""
    late = hosts(4, (0, 4000.0), (1, 4010.0))
    closed = Breaker(at=200.0, counted=ahead(late, 200.0))
    seen = structs.replace(late, breaker=closed)
    one, *others = seen.hosts
    again = structs.replace(one, alerts=(structs.replace(one.alerts[0], worse_at=4200.0),))
    new = structs.replace(others[1], alerts=(finding("h2", id="new", at=4201.0),))
    moved = moving(*range(4000, 4007))
    over = Breaker(at=200.0, counted=ahead(moved, 200.0))

    assert closed.counted == {"h0-1": 4000.0, "h1-1": 4010.0}
    assert ahead(late, 4005.0) == {"h1-1": 4010.0}
    assert tripped(seen, RULES) is None
    assert tripped(structs.replace(seen, hosts=(again, others[0], new)), RULES) is not None
    assert tripped(moved, RULES) is not None
    assert tripped(structs.replace(moved, breaker=over), RULES) is None


def test_an_open_breaker_is_not_opened_again():
    assert tripped(structs.replace(hosts(2, (0, 60.0), (1, 60.0)), breaker=OPEN), RULES) is None


# --- what it holds back ---------------------------------------------------------------------------


def verdict(urgency, request=""):
    return Verdict("job", worker("h2"), urgency, "c", "r", policy="p", request=request)


def test_an_open_breaker_holds_back_policies_but_not_operators():
    view = cluster(breaker=OPEN)

    assert "too much" in held_back(view, verdict(Urgency.DRAIN))
    assert held_back(view, verdict(Urgency.DRAIN, request="r")) == ""
    assert held_back(cluster(), verdict(Urgency.DRAIN)) == ""


def test_an_open_breaker_lets_dead_workers_be_replaced():
    """It lets no other worker be named dead."""
    dead = verdict(Urgency.FAILED)
    alert = finding(code="trainer.stalled", entity=worker("h2"), severity=Severity.FATAL, job="job")
    ended = structs.replace(host("h2"), exits=(Exit(worker("h2"), "job", -9, 0.0),))
    silent = structs.replace(cluster(breaker=OPEN), hosts=(host("h1"), host("h3")))

    assert held_back(cluster(ended, breaker=OPEN), dead) == ""
    assert held_back(cluster(host("h2", alert), breaker=OPEN), dead) == ""
    assert held_back(silent, dead) == ""
    assert "too much" in held_back(cluster(breaker=OPEN), dead)

"""The circuit breaker, and what stands for more than one host's own fault."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.plugins.clusters import RECORD, cluster, finding, host, planned
from tests.values import worker
from tmd.core.alerts.breaker import BreakerRules, held_back, tripped
from tmd.core.alerts.correlated_faults import contained
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
    """``count`` hosts; those of ``raising`` have raised a finding at that time."""
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

    assert "h0, h1" in tripped(inside, RULES)
    assert tripped(outside, RULES) is None


@pytest.mark.parametrize(
    "changes",
    [{"severity": Severity.WARNING}, {"strategy": Strategy.OBSERVE}, {"job": "job"}],
    ids=["warning", "observe", "about a worker"],
)
def test_what_moves_nobody_opens_nothing(changes):
    """A job that crashes takes all its workers with it: that is for the failover."""
    assert tripped(hosts(2, (0, 100.0), (1, 100.0), **changes), RULES) is None


def moving(*starts, **changes):
    plans = tuple(
        planned(number, timeline=(Mark(Phase.PREPARE, at),), **changes)
        for number, at in enumerate(starts)
    )
    return ClusterView(jobs=(structs.replace(RECORD, history=plans, plan=plans[-1]),))


def test_more_moves_by_policies_than_allowed_open_it():
    six, seven = [100.0 + n for n in range(6)], [100.0 + n for n in range(7)]

    assert tripped(moving(*six), RULES) is None
    assert "more than 6" in tripped(moving(*seven), RULES)
    assert tripped(moving(*six, 100.0 + 3601), RULES) is None


@pytest.mark.parametrize(
    "changes",
    [{"request": "r"}, {"kind": PlanKind.FAILOVER}, {"policy": ""}],
    ids=["operator", "failover", "nobody's"],
)
def test_other_migrations_do_not_count(changes):
    assert tripped(moving(*range(100, 140), **changes), RULES) is None


def test_what_was_before_it_was_closed_does_not_open_it_again():
    closed = Breaker(at=200.0)
    old = structs.replace(hosts(2, (0, 100.0), (1, 110.0)), breaker=closed)
    new = structs.replace(hosts(2, (0, 210.0), (1, 220.0)), breaker=closed)

    assert tripped(old, RULES) is None
    assert tripped(new, RULES) is not None


def test_an_open_one_is_not_opened_again():
    assert tripped(structs.replace(hosts(2, (0, 60.0), (1, 60.0)), breaker=OPEN), RULES) is None


# --- what it holds back ---------------------------------------------------------------------------


def verdict(urgency, request=""):
    return Verdict("job", worker("h2"), urgency, "c", "r", policy="p", request=request)


def test_open_it_holds_back_policies_and_not_operators():
    view = cluster(breaker=OPEN)

    assert "too much" in held_back(view, verdict(Urgency.DRAIN))
    assert held_back(view, verdict(Urgency.DRAIN, request="r")) == ""
    assert held_back(cluster(), verdict(Urgency.DRAIN)) == ""


def test_open_it_lets_the_dead_be_replaced():
    """But nobody else be named dead."""
    dead = verdict(Urgency.FAILED)
    alert = finding(code="trainer.stalled", entity=worker("h2"), severity=Severity.FATAL, job="job")
    ended = structs.replace(host("h2"), exits=(Exit(worker("h2"), "job", -9, 0.0),))
    silent = structs.replace(cluster(breaker=OPEN), hosts=(host("h1"), host("h3")))

    assert held_back(cluster(ended, breaker=OPEN), dead) == ""
    assert held_back(cluster(host("h2", alert), breaker=OPEN), dead) == ""
    assert held_back(silent, dead) == ""
    assert "too much" in held_back(cluster(breaker=OPEN), dead)


# --- blast radius ---------------------------------------------------------------------------------


def shown(view):
    """What policies see: host -> strategies of its findings."""
    return {h.host: [a.strategy for a in h.alerts] for h in contained(view, RULES).hosts}


def at(name, *raises, **changes):
    alerts = tuple(
        finding(name, id=f"{name}-{n}", entity=f"gpu:{n}", at=when, **changes)
        for n, when in enumerate(raises)
    )
    return host(name, *alerts, at=1000.0)


def test_the_same_finding_on_two_hosts_at_once_only_advises():
    """All of it, also what other devices of the same host say."""
    view = cluster(at("h1", 100.0, 101.0, 102.0), at("h2", 150.0), at("h3", 500.0))
    strategies = shown(view)

    assert strategies["h1"] == [Strategy.ADVISE] * 3
    assert strategies["h2"] == [Strategy.ADVISE]
    assert strategies["h3"] == [Strategy.ACT]


@given(st.lists(st.tuples(st.sampled_from(["h1", "h2", "h3"]), st.integers(0, 300)), max_size=12))
def test_a_finding_acts_exactly_if_no_other_host_said_the_same_near_it(raises):
    times = {name: [float(w) for h, w in raises if h == name] for name in ("h1", "h2", "h3")}
    strategies = shown(cluster(*(at(name, *when) for name, when in times.items())))

    for name, when in times.items():
        others = [t for other, ts in times.items() if other != name for t in ts]
        alone = [all(abs(one - t) > RULES.same_within_s for t in others) for one in when]
        assert [s is Strategy.ACT for s in strategies[name]] == alone


def test_different_findings_do_not_make_each_other_doubtful():
    view = cluster(at("h1", 100.0), at("h2", 100.0, code="nvml.hot"))

    assert shown(view)["h1"] == [Strategy.ACT]


def test_findings_about_workers_stay_as_they_are():
    """Five ranks of one job that die together are five failovers, at once."""
    changes = {"job": "job", "code": "trainer.stalled"}
    view = cluster(at("h1", 999.9, **changes), at("h2", 999.9, **changes))

    assert shown(view)["h1"] == shown(view)["h2"] == [Strategy.ACT]


def test_a_finding_waits_for_others_to_be_heard():
    """By the clock of its own host."""
    assert shown(cluster(at("h1", 990.1)))["h1"] == [Strategy.ADVISE]
    assert shown(cluster(at("h1", 990.0)))["h1"] == [Strategy.ACT]


def test_what_only_observes_is_not_shown():
    view = cluster(at("h1", 100.0, strategy=Strategy.OBSERVE))

    assert shown(view)["h1"] == []

"""What stands for more than one host's own fault."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.plugins.clusters import cluster, finding, host
from tmd.core.alerts.breaker import BreakerRules
from tmd.core.alerts.correlated_faults import contained, shared_bans
from tmd.core.alerts.findings import FindingRules, Origin, ban
from tmd.core.values.model import Strategy

RULES = BreakerRules()


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
def test_a_finding_acts_only_if_no_other_host_raised_the_same_near_it(raises):
    times = {name: [float(w) for h, w in raises if h == name] for name in ("h1", "h2", "h3")}
    strategies = shown(cluster(*(at(name, *when) for name, when in times.items())))

    for name, when in times.items():
        others = [t for other, ts in times.items() if other != name for t in ts]
        alone = [all(abs(one - t) > RULES.same_within_s for t in others) for one in when]
        assert [s is Strategy.ACT for s in strategies[name]] == alone


def banned(name, when, cause="nic.down"):
    rules = FindingRules(repeats=3)
    origin = Origin(name, "nic", Strategy.ACT, rules)
    return host(name, ban(origin, finding(name, code=cause, id=f"{name}-{when}"), 3, when))


def test_bans_of_several_hosts_at_once_for_the_same_finding_are_shared():
    """A switch blipped. A ban of an earlier release does not say for what it is."""
    old = banned("h5", 100.0)
    old = structs.replace(old, alerts=(structs.replace(old.alerts[0], evidence=()),))
    view = cluster(
        banned("h1", 100.0),
        banned("h2", 100.0 + RULES.same_within_s),
        banned("h3", 101.0, cause="nvml.ecc"),
        banned("h4", 500.0),
        old,
    )
    found = shared_bans([a for host in view.hosts for a in host.alerts], RULES)

    assert found == {
        "h1-100.0-ban": "h2 raised the same within 60 s",
        "h2-160.0-ban": "h1 raised the same within 60 s",
    }


def test_different_findings_do_not_make_each_other_doubtful():
    view = cluster(at("h1", 100.0), at("h2", 100.0, code="nvml.hot"))

    assert shown(view)["h1"] == [Strategy.ACT]


def test_findings_about_workers_stay_as_they_are():
    """Five ranks of one job that die together are five failovers, at once."""
    changes = {"job": "job", "code": "trainer.stalled"}
    view = cluster(at("h1", 999.9, **changes), at("h2", 999.9, **changes))

    assert shown(view)["h1"] == shown(view)["h2"] == [Strategy.ACT]


def test_a_finding_waits_for_reports_of_other_hosts():
    """By the clock of its own host."""
    assert shown(cluster(at("h1", 990.1)))["h1"] == [Strategy.ADVISE]
    assert shown(cluster(at("h1", 990.0)))["h1"] == [Strategy.ACT]


def test_a_finding_that_gets_worse_waits_for_reports_of_other_hosts():
    assert shown(cluster(at("h1", 100.0, worse_at=990.1)))["h1"] == [Strategy.ADVISE]
    assert shown(cluster(at("h1", 100.0, worse_at=990.0)))["h1"] == [Strategy.ACT]


def test_a_finding_that_gets_worse_on_two_hosts_at_once_only_advises():
    """One that was raised on two hosts at once does so as well, even if one of them gets worse."""
    both = shown(cluster(at("h1", 100.0, worse_at=800.0), at("h2", 500.0, worse_at=810.0)))
    one = shown(cluster(at("h1", 100.0, worse_at=800.0), at("h2", 110.0)))
    new = shown(cluster(at("h1", 100.0, worse_at=800.0), at("h2", 810.0)))
    apart = shown(cluster(at("h1", 100.0, worse_at=800.0), at("h2", 500.0, worse_at=900.0)))

    assert [s["h1"] for s in (both, one, new)] == [[Strategy.ADVISE]] * 3
    assert [s["h2"] for s in (both, one, new)] == [[Strategy.ADVISE]] * 3
    assert apart["h1"] == apart["h2"] == [Strategy.ACT]


def test_a_finding_of_before_its_clock_was_set_back_does_not_wait():
    """Else nothing would be done about it for as long as the clock was wrong."""
    assert shown(cluster(at("h1", 8000.0)))["h1"] == [Strategy.ACT]


def test_findings_of_observing_detectors_are_left_out():
    view = cluster(at("h1", 100.0, strategy=Strategy.OBSERVE))

    assert shown(view)["h1"] == []

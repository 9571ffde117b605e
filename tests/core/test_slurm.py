"""What Slurm and tmd tell each other, on what ``sinfo`` 22.05 printed."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.values import alert, plan, record
from tmd.core.planning.scheduler_drains import LONGEST_REASON, observed
from tmd.core.planning.slurm import (
    SlurmChanges,
    SlurmNode,
    SlurmRules,
    changes,
    nodes_of,
)
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.model import ClusterView, HostStatus, Severity, Strategy
from tmd.core.values.requests import DrainRequest

PRINTED = """\
n1|draining|disk | swap: bad
n1|draining|disk | swap: bad
n2|drained*|tmd: nvml.ecc: x
n3|completing*|none
n4|idle~|none
n5|down|gone
"""
FAULT = alert(
    code="nvml.ecc", severity=Severity.FATAL, strategy=Strategy.ACT, message='a "row"\nis bad'
)


RULES = SlurmRules()


def host(name, *alerts):
    return HostStatus(name, "i", alerts=alerts)


def view(*hosts, **changes):
    return ClusterView(hosts=hosts, **changes)


def drained(name, by):
    return DrainRequest(name, "r", by=by)


def agreed(view, nodes, rules=RULES):
    """The changes, for hosts that have been seen as they are for a long time."""
    known = observed({}, view, {}, 0.0)
    return changes(view, nodes, records=known, now=5000.0, rules=rules)


# --- parsing --------------------------------------------------------------------------------------


def test_each_node_is_read_once_with_its_state_and_reason():
    """A reason may hold the separator; a node in two partitions has two lines."""
    assert nodes_of(PRINTED) == (
        SlurmNode("n1", "draining", "disk | swap: bad"),
        SlurmNode("n2", "drained", "tmd: nvml.ecc: x"),
        SlurmNode("n3", "completing"),
        SlurmNode("n4", "idle"),
        SlurmNode("n5", "down", "gone"),
    )


@pytest.mark.parametrize("text", ["", "\n", "|idle|", "n1", "n1|", "slurm_load_node error: x"])
def test_what_is_no_node_is_skipped(text):
    assert nodes_of(text) == ()


# --- from Slurm to tmd ----------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["drain", "draining", "drained", "fail", "failing"])
def test_a_node_that_an_administrator_drains_is_drained(state):
    node = SlurmNode("n1", state, "disk bad")

    assert agreed(view(host("n1")), [node]) == SlurmChanges(drain=(("n1", "slurm: disk bad"),))


@pytest.mark.parametrize("state", ["idle", "allocated", "mixed", "down", "completing", "maint"])
def test_no_other_state_drains_a_host(state):
    """What happens to a host that is down is known better by tmd."""
    assert agreed(view(host("n1")), [SlurmNode("n1", state, "r")]) == SlurmChanges()


def test_a_request_is_not_made_twice_and_one_of_an_operator_stays():
    node = SlurmNode("n1", "drained", "disk bad")
    for by in ("slurm: disk bad", "alice"):
        there = view(host("n1"), drains=(drained("n1", by),))

        assert agreed(there, [node]) == SlurmChanges()


@pytest.mark.parametrize("leave", [False, True])
def test_a_request_whose_workers_stay_is_made_anew_once_they_are_to_leave(leave):
    there = view(host("n1"), drains=(drained("n1", "slurm: disk bad"),))
    found = agreed(there, [SlurmNode("n1", "drained", "disk bad")], rules=SlurmRules(leave=leave))

    assert [name for name, _ in found.drain] == ["n1"] * leave


def test_only_a_request_that_stands_for_the_node_is_withdrawn():
    idle = [SlurmNode("n1", "idle"), SlurmNode("n2", "idle")]
    requests = (drained("n1", "slurm: disk bad"), drained("n2", "alice"))

    assert agreed(view(host("n1"), host("n2"), drains=requests), idle) == SlurmChanges(
        undrain=("n1",)
    )


def test_a_request_stays_while_slurm_does_not_show_its_node():
    """It is reported, since nothing else would end it."""
    requests = (drained("n1", "slurm: disk bad"), drained("n2", "alice"))
    found = agreed(view(host("n1"), host("n2"), drains=requests), [])

    assert (found.undrain, len(found.problems)) == ((), 1)
    assert "'tmd undrain n1'" in found.problems[0]


@pytest.mark.parametrize("drains", [(), (drained("n1", "slurm: disk bad"),)])
def test_a_node_of_exactly_the_name_of_the_host_is_the_host(drains):
    """Another one whose name differs by its domain is not: it would withdraw what the first asks
    for, and the first would ask again, in turn."""
    nodes = [SlurmNode("n1.example", "idle"), SlurmNode("n1", "drained", "disk bad")]
    found = agreed(view(host("n1"), drains=drains), nodes)

    assert found == SlurmChanges(drain=() if drains else (("n1", "slurm: disk bad"),))


@pytest.mark.parametrize("drains", [(), (drained("n1", "slurm: disk bad"),)])
def test_two_nodes_that_may_be_one_host_are_left_alone(drains):
    """Neither is drained for a finding. That is reported, with the remedy."""
    nodes = [SlurmNode("n1.x", "drained", "disk bad"), SlurmNode("n1.y", "idle")]
    found = agreed(view(host("n1", FAULT), drains=drains), nodes)

    assert found == SlurmChanges(problems=found.problems)
    assert "nodes n1.x, n1.y are left alone: each may be host n1" in found.problems[0]
    assert "[host] name" in found.problems[0]


def test_a_node_without_tmd_is_left_alone():
    assert agreed(view(host("n1")), [SlurmNode("other", "drained", "r")]) == SlurmChanges()


def test_a_silent_host_that_holds_a_rank_is_drained():
    record_ = record("n1")

    assert agreed(view(jobs=(record_,)), [SlurmNode("n1", "drained", "r")]).drain


@pytest.mark.parametrize(
    ("node", "hosts", "meant"),
    [
        ("n1", ("n1.example", "n2.example"), "n1.example"),
        ("n1.example", ("n1",), "n1"),
        ("n1", ("n1.a", "n1.b"), None),
        ("n1.a", ("n1.a", "n1.b"), "n1.a"),
        ("n1.a", ("n1.b",), None),
    ],
)
def test_a_short_name_means_a_host_if_it_means_only_one(node, hosts, meant):
    found = agreed(view(*map(host, hosts)), [SlurmNode(node, "drained", "r")])

    assert [h for h, _ in found.drain] == ([meant] if meant else [])


def test_slurm_never_drains_as_many_hosts_as_would_open_the_breaker():
    """Those that are drained count; the others are reported, and follow when there is room."""
    names = ("n1", "n2", "n3", "n4", "n5")
    hosts = tuple(map(host, names))
    nodes = [SlurmNode(name, "drained", "rack") for name in names]
    first = agreed(view(*hosts), nodes)
    there = tuple(drained(name, by) for name, by in first.drain)
    second = agreed(view(*hosts, drains=there), nodes)
    third = agreed(view(*hosts, drains=there), [SlurmNode("n1", "idle"), *nodes[1:]])

    assert [name for name, _ in first.drain] == ["n1", "n2"]
    assert [line.split()[1] for line in first.problems] == ["n3", "n4", "n5"]
    assert (second.drain, len(second.problems)) == ((), 3)
    assert (third.undrain, [name for name, _ in third.drain]) == (("n1",), ["n3"])


def test_a_host_that_got_a_rank_again_after_a_loss_is_drained_again():
    """A request moves ranks off its host once. It is not made again while a plan may serve it."""
    request = drained("n1", "slurm: disk bad")
    job = record("n1", "n2")
    served = structs.replace(job, history=(plan(job.membership, request=request.id),))
    there = {"drains": (request,)}
    nodes = [SlurmNode("n1", "drained", "disk bad")]

    assert agreed(view(host("n1"), jobs=(job,), **there), nodes) == SlurmChanges()
    assert [n for n, _ in agreed(view(host("n1"), jobs=(served,), **there), nodes).drain] == ["n1"]


# --- from tmd to Slurm ----------------------------------------------------------------------------


def test_a_host_that_is_unfit_is_drained_in_slurm():
    """With the gravest finding as the reason, on one line and without quotes."""
    degraded = structs.replace(FAULT, code="nic.flap", severity=Severity.DEGRADED)

    assert agreed(view(host("n1", degraded, FAULT)), [SlurmNode("n1", "mixed")]) == SlurmChanges(
        mark=(("n1", "tmd: nvml.ecc: a 'row' is bad"),)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": Strategy.OBSERVE},
        {"strategy": Strategy.ADVISE},
        {"severity": Severity.WARNING},
        {"job": "gpt"},
    ],
    ids=str,
)
def test_a_finding_that_may_not_act_or_is_not_about_the_host_changes_nothing(changes):
    told = view(host("n1", structs.replace(FAULT, **changes)))

    assert agreed(told, [SlurmNode("n1", "idle")]) == SlurmChanges()


def test_a_banned_host_is_drained_in_slurm():
    ban = alert(code="host.banned", severity=Severity.WARNING, message="came back 3 times")

    assert agreed(view(host("n1", ban)), [SlurmNode("n1", "idle")]).mark


def test_nothing_is_told_while_the_breaker_is_open_or_if_it_is_switched_off():
    sick, nodes = host("n1", FAULT), [SlurmNode("n1", "idle")]

    assert agreed(view(sick, breaker=Breaker(open=True)), nodes) == SlurmChanges()
    assert agreed(view(sick), nodes, SlurmRules(drain_nodes=False)) == SlurmChanges()


def test_a_drain_for_a_finding_does_not_come_back_as_a_drain_of_tmd():
    """Policies decide what a finding does to ranks."""
    node = SlurmNode("n1", "drained", "tmd: nvml.ecc: x")

    assert agreed(view(host("n1", FAULT)), [node]) == SlurmChanges()


def test_only_a_drain_for_a_finding_is_taken_back_when_it_is_over():
    nodes = [
        SlurmNode("n1", "drained", "tmd: nvml.ecc: x"),
        SlurmNode("n2", "drained", "tmd scan: x"),
    ]
    requests = (drained("n2", "slurm: tmd scan: x"),)

    assert agreed(view(host("n1"), host("n2"), drains=requests), nodes) == SlurmChanges(
        resume=("n1",)
    )


OURS = SlurmNode("n1", "drained", "tmd: nvml.ecc: x")


def resumed(*looks, declared=None, code="", rules=RULES):
    """Whether the node is resumed after looks, each a time and a status or None (silent).
    ``declared``: when the host was declared healthy, known at the last look; ``code``: of what."""
    known = {}
    for number, (now, status) in enumerate(looks, start=1):
        last = view(*([status] if status else []), jobs=(record("n1"),))
        news = {"n1": declared} if declared is not None and number == len(looks) else {}
        news = {name: {code: at} for name, at in news.items()}
        known = observed(known, last, news, now)
    return bool(changes(last, [OURS], records=known, now=now, rules=rules).resume)


def test_a_node_is_resumed_once_one_run_of_its_daemon_reports_nothing_for_long():
    """A daemon that has just started reports nothing either."""
    sick, well = host("n1", FAULT), host("n1")
    restarted = structs.replace(well, incarnation="j")

    assert resumed((0, sick), (100, well), (700, well))
    assert not resumed((0, sick), (100, well), (699, well))
    assert not resumed((0, sick), (100, restarted), (699, restarted))
    assert not resumed((0, well), (500, restarted), (700, restarted))
    assert not resumed((0, well), (500, sick), (501, well), (700, well))
    assert not resumed((0, well), (500, None), (501, well), (700, well))
    assert resumed((0, well), (60, well), rules=SlurmRules(resume_after_s=60))


def test_a_node_is_resumed_at_once_when_its_host_was_declared_healthy():
    """Not for a finding that came later, and not while one is left."""
    sick = host("n1", structs.replace(FAULT, at=50.0))
    well = host("n1")

    assert resumed((0, sick), (1, well), declared=51.0)
    assert not resumed((0, sick), (1, well), declared=49.0)
    assert not resumed((0, sick), (1, sick), declared=51.0)
    assert not resumed((0, sick), (1, None), declared=51.0)


def test_a_declaration_about_another_code_resumes_no_node():
    """It counts only for its code, so each finding of the host since it was fit needs one."""
    ecc = structs.replace(FAULT, at=50.0)
    sick, well = host("n1", ecc), host("n1")
    both = host("n1", ecc, structs.replace(ecc, code="nic.flap"))

    assert resumed((0, sick), (1, well), declared=51.0, code="nvml.ecc")
    assert not resumed((0, sick), (1, well), declared=51.0, code="nic.flap")
    assert not resumed((0, well), (1, well), declared=51.0, code="nic.flap")
    assert not resumed((0, both), (1, well), declared=51.0, code="nvml.ecc")
    assert resumed((0, both), (1, well), (2, sick), (3, well), declared=51.0, code="nvml.ecc")


def test_a_silent_host_is_not_given_back_to_the_scheduler():
    """Whether the fault is over is not known."""
    node = SlurmNode("n1", "drained", "tmd: nvml.ecc: x")

    assert agreed(view(jobs=(record("n1"),)), [node]) == SlurmChanges()


def test_an_administrator_who_drains_a_marked_node_is_heard():
    """The reason is another one then."""
    node = SlurmNode("n1", "drained", "my turn")

    assert agreed(view(host("n1", FAULT)), [node]) == SlurmChanges(
        drain=(("n1", "slurm: my turn"),)
    )


def test_a_reason_is_cut():
    long = structs.replace(FAULT, message="x" * 1000)
    ((_, reason),) = agreed(view(host("n1", long)), [SlurmNode("n1", "idle")]).mark

    assert len(reason) == LONGEST_REASON

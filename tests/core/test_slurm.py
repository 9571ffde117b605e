"""What Slurm and tmd tell each other, on what ``sinfo`` 22.05 printed."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.values import alert, record
from tmd.core.planning.slurm import LONGEST_REASON, Node, Steps, nodes_of, steps
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


def host(name, *alerts):
    return HostStatus(name, "i", alerts=alerts)


def view(*hosts, **changes):
    return ClusterView(hosts=hosts, **changes)


def drained(name, by):
    return DrainRequest(name, "r", by=by)


# --- parsing --------------------------------------------------------------------------------------


def test_each_node_is_read_once_with_its_state_and_reason():
    """A reason may hold the separator; a node in two partitions has two lines."""
    assert nodes_of(PRINTED) == (
        Node("n1", "draining", "disk | swap: bad"),
        Node("n2", "drained", "tmd: nvml.ecc: x"),
        Node("n3", "completing"),
        Node("n4", "idle"),
        Node("n5", "down", "gone"),
    )


@pytest.mark.parametrize("text", ["", "\n", "|idle|", "n1", "n1|", "slurm_load_node error: x"])
def test_what_is_no_node_is_skipped(text):
    assert nodes_of(text) == ()


# --- from Slurm to tmd ----------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["drain", "draining", "drained", "fail", "failing"])
def test_a_node_that_an_administrator_drains_is_drained(state):
    node = Node("n1", state, "disk bad")

    assert steps(view(host("n1")), [node]) == Steps(drain=(("n1", "slurm: disk bad"),))


@pytest.mark.parametrize("state", ["idle", "allocated", "mixed", "down", "completing", "maint"])
def test_no_other_state_drains_a_host(state):
    """What happens to a host that is down is known better by tmd."""
    assert steps(view(host("n1")), [Node("n1", state, "r")]) == Steps()


def test_a_request_is_not_made_twice_and_one_of_an_operator_stays():
    node = Node("n1", "drained", "disk bad")
    for by in ("slurm: disk bad", "alice"):
        there = view(host("n1"), drains=(drained("n1", by),))

        assert steps(there, [node]) == Steps()


def test_only_a_request_that_stands_for_the_node_is_withdrawn():
    idle = [Node("n1", "idle"), Node("n2", "idle")]
    requests = (drained("n1", "slurm: disk bad"), drained("n2", "alice"))

    assert steps(view(host("n1"), host("n2"), drains=requests), idle) == Steps(undrain=("n1",))


def test_a_request_stays_while_slurm_does_not_show_its_node():
    requests = (drained("n1", "slurm: disk bad"),)

    assert steps(view(host("n1"), drains=requests), []) == Steps()


def test_a_node_without_tmd_is_left_alone():
    assert steps(view(host("n1")), [Node("other", "drained", "r")]) == Steps()


def test_a_silent_host_that_holds_a_rank_is_drained():
    record_ = record("n1")

    assert steps(view(jobs=(record_,)), [Node("n1", "drained", "r")]).drain


@pytest.mark.parametrize(
    ("node", "hosts", "meant"),
    [
        ("n1", ("n1.example", "n2.example"), "n1.example"),
        ("n1.example", ("n1",), "n1"),
        ("n1", ("n1.a", "n1.b"), None),
        ("n1.a", ("n1.a", "n1.b"), "n1.a"),
    ],
)
def test_a_short_name_means_a_host_if_it_means_only_one(node, hosts, meant):
    found = steps(view(*map(host, hosts)), [Node(node, "drained", "r")])

    assert [h for h, _ in found.drain] == ([meant] if meant else [])


# --- from tmd to Slurm ----------------------------------------------------------------------------


def test_a_host_that_is_unfit_is_drained_in_slurm():
    """With the gravest finding as the reason, on one line and without quotes."""
    degraded = structs.replace(FAULT, code="nic.flap", severity=Severity.DEGRADED)

    assert steps(view(host("n1", degraded, FAULT)), [Node("n1", "mixed")]) == Steps(
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

    assert steps(told, [Node("n1", "idle")]) == Steps()


def test_a_banned_host_is_drained_in_slurm():
    ban = alert(code="host.banned", severity=Severity.WARNING, message="came back 3 times")

    assert steps(view(host("n1", ban)), [Node("n1", "idle")]).mark


def test_nothing_is_told_while_the_breaker_is_open_or_if_it_is_switched_off():
    sick, nodes = host("n1", FAULT), [Node("n1", "idle")]

    assert steps(view(sick, breaker=Breaker(open=True)), nodes) == Steps()
    assert steps(view(sick), nodes, tell=False) == Steps()


def test_a_drain_for_a_finding_does_not_come_back_as_a_drain_of_tmd():
    """Policies decide what a finding does to ranks."""
    node = Node("n1", "drained", "tmd: nvml.ecc: x")

    assert steps(view(host("n1", FAULT)), [node]) == Steps()


def test_only_a_drain_for_a_finding_is_taken_back_when_it_is_over():
    nodes = [Node("n1", "drained", "tmd: nvml.ecc: x"), Node("n2", "drained", "tmd scan: x")]
    requests = (drained("n2", "slurm: tmd scan: x"),)

    assert steps(view(host("n1"), host("n2"), drains=requests), nodes) == Steps(resume=("n1",))


def test_a_silent_host_is_not_given_back_to_the_scheduler():
    """Whether the fault is over is not known."""
    node = Node("n1", "drained", "tmd: nvml.ecc: x")

    assert steps(view(jobs=(record("n1"),)), [node]) == Steps()


def test_an_administrator_who_drains_a_marked_node_is_heard():
    """The reason is another one then."""
    node = Node("n1", "drained", "my turn")

    assert steps(view(host("n1", FAULT)), [node]) == Steps(drain=(("n1", "slurm: my turn"),))


def test_a_reason_is_cut():
    long = structs.replace(FAULT, message="x" * 1000)
    ((_, reason),) = steps(view(host("n1", long)), [Node("n1", "idle")]).mark

    assert len(reason) == LONGEST_REASON

"""What schedulers have in common; the rest is shown for Slurm and for Kubernetes."""

from __future__ import annotations

import math

import pytest

from tmd.core.planning.scheduler_drains import (
    LONGEST_REASON,
    HostDrains,
    brief,
    host_drains,
    matching,
    observed,
)
from tmd.core.values.model import ClusterView, HostStatus
from tmd.core.values.requests import DrainRequest

NAMES = ("n1", "n2", "n3")


def asked(*causes, drains=(), share=1.0, barred=()):
    hosts = tuple(HostStatus(name, "i") for name in NAMES)
    view = ClusterView(hosts=hosts, drains=drains)
    return host_drains(view, causes, by="s:", hosts_share=share, barred=barred)


@pytest.mark.parametrize(
    ("cause", "by", "expected"),
    [
        ("", None, HostDrains()),
        ("", "s: x", HostDrains(undrain=("n1",))),
        ("", "ann", HostDrains()),
        ("y", None, HostDrains(drain=(("n1", "s: y"),))),
        ("y", "s: x", HostDrains()),
        ("y", "ann", HostDrains()),
    ],
)
def test_only_a_request_in_the_name_of_the_scheduler_follows_it(cause, by, expected):
    """Every case of a node and of the request for its host."""
    drains = () if by is None else (DrainRequest("n1", "r", by=by),)

    assert asked(("n1", cause), drains=drains) == expected


@pytest.mark.parametrize(
    ("request_", "again"),
    [
        (DrainRequest("n1", "r", by="s: x", reserve=True), True),
        (DrainRequest("n1", "r", by="s: x"), False),
        (DrainRequest("n1", "r", by="ann", reserve=True), False),
    ],
)
def test_a_request_that_allows_a_rank_is_made_anew_where_none_may_be(request_, again):
    """It needs no room of its own. That of another is left alone."""
    found = asked(("n1", "y"), drains=(request_,), share=0.1, barred={"n1"})

    assert found == HostDrains(drain=(("n1", "s: y"),) if again else ())


def test_a_request_without_a_node_is_named_and_kept():
    drains = (DrainRequest("n1", "r", by="s: x"), DrainRequest("n2", "r", by="ann"))

    assert asked(drains=drains) == HostDrains(unseen=("n1",))


def test_there_is_room_for_fewer_hosts_than_open_the_breaker():
    """At least one; the one that waits is named with the scheduler."""
    found = asked(("n1", "x"), ("n2", "x"), share=0.1)

    assert found.drain == (("n1", "s: x"),)
    assert found.waiting[0].startswith("host n2 is not drained yet: of 3 hosts no more than 1 ")
    assert "drained for S at the same time" in found.waiting[0]


def test_since_when_a_host_is_silent_is_known_of_one_that_was_heard():
    there, gone = ClusterView(hosts=(HostStatus("n1", "i"),)), ClusterView()
    asked_for = ClusterView(drains=(DrainRequest("n2", "r"),))
    heard = observed({}, there, {}, 1.0)
    silent = observed(heard, gone, {}, 2.0)

    assert math.isinf(heard["n1"].silent_since)
    assert silent["n1"].silent_since == observed(silent, gone, {}, 3.0)["n1"].silent_since == 2.0
    assert math.isinf(observed(silent, there, {}, 4.0)["n1"].silent_since)
    assert math.isinf(observed(silent, asked_for, {}, 4.0)["n2"].silent_since)


def test_a_name_means_one_host_or_none():
    assert matching(["a.x", "b", "c.x", "c.y"], ["a", "b.z", "c", "d"]) == {"a": "a.x", "b.z": "b"}


def test_a_reason_is_one_short_line_without_double_quotes():
    assert brief('a "row"\n is\x1b bad').startswith("a 'row' is")
    assert len(brief("x" * 999)) == LONGEST_REASON

"""Questions about a view of the cluster."""

from __future__ import annotations

from msgspec import structs

from tests.plugins.clusters import RECORD, cluster
from tests.values import record
from tmd.core.values.model import ClusterView, JobState
from tmd.core.values.requests import DrainRequest
from tmd.core.values.view_checks import drain_roles, jobs_by_host, known_hosts, unknown_host


def test_a_host_with_several_ranks_of_a_job_has_it_once() -> None:
    twice = record("h1", "h2", "h1")

    assert jobs_by_host(cluster(record=twice)) == {"h1": [twice], "h2": [twice]}


def test_an_ended_job_is_on_no_host() -> None:
    ended = structs.replace(RECORD, state=JobState.FINISHED)
    drained = DrainRequest("h1", "r")

    assert jobs_by_host(cluster(record=ended)) == {}
    assert drain_roles(cluster(drains=(drained,))) == {"h1": "draining"}
    assert drain_roles(cluster(record=ended, drains=(drained,))) == {"h1": "drained"}


def test_an_unknown_host_is_named_with_those_that_are_known() -> None:
    assert unknown_host(cluster(), "h1") == ""
    assert "known hosts: h1, h2, h3" in unknown_host(cluster(), "h9")


def test_hosts_with_a_rank_or_a_request_are_known_without_a_heartbeat() -> None:
    drains = (DrainRequest("n2", "r"),)
    view = ClusterView(jobs=(record("n1"),), drains=drains, unread=("n3",))

    assert known_hosts(view) == {"n1", "n2", "n3"}
    assert [unknown_host(view, name) for name in ("n1", "n2", "n3")] == ["", "", ""]

"""Questions about a view of the cluster."""

from __future__ import annotations

from msgspec import structs

from tests.plugins.clusters import RECORD, cluster
from tests.values import record
from tmd.core.values.model import JobState
from tmd.core.values.requests import DrainRequest
from tmd.core.values.view_checks import drain_roles, jobs_by_host, unknown_host


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

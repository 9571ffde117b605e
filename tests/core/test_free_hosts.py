"""Whether a host can be taken away."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.values import member, plan, record, worker
from tmd.core.planning.free_hosts import is_free, unreadable
from tmd.core.values.model import (
    ClusterView,
    HostStatus,
    JobRecord,
    JobState,
    Membership,
    Move,
    Phase,
)
from tmd.testing.clients import worker_status

GIVES = plan(
    Membership(2, (member("n3"),)),
    phase=Phase.SWITCH,
    moves=(Move(rank=0, leaver=member("n1"), joiner=member("n3")),),
)
"""A live plan that moves a rank from n1 to n3."""


def holding(host: str, rank: int | None, job: str = "job") -> HostStatus:
    status = structs.replace(worker_status(worker(host)), job=job, rank=rank)
    return HostStatus(host, "i", workers=(status,))


@pytest.mark.parametrize(
    ("job", "free"),
    [
        (record("n2"), True),
        (record("n1", "n2"), False),
        (record("n1", state=JobState.FINISHED), True),
        (record("n1", state=JobState.FINISHED, plan=GIVES), True),
        # It is the joiner of a live plan, or the leaver, which may get its rank back.
        (record("n2", plan=structs.replace(GIVES, new=Membership(2, (member("n1"),)))), False),
        (record("n2", plan=GIVES), False),
        (record("n2", plan=structs.replace(GIVES, phase=Phase.DONE)), True),
    ],
)
def test_a_host_is_free_if_it_holds_no_rank_and_no_live_plan_may_give_it_one(
    job: JobRecord, free: bool
) -> None:
    view = ClusterView(hosts=(HostStatus("n1", "i"),), jobs=(job,))

    assert is_free(view, "n1") is free


@pytest.mark.parametrize(("rank", "free"), [(None, True), (0, False)])
def test_a_worker_that_says_it_holds_a_rank_is_believed(rank: int | None, free: bool) -> None:
    """Redis may have lost the record of its job."""
    assert is_free(ClusterView(hosts=(holding("n1", rank),)), "n1") is free


def test_a_rank_of_a_job_that_has_ended_counts_no_more() -> None:
    ended = record("n1", state=JobState.FAILED)

    assert is_free(ClusterView(hosts=(holding("n1", 0),), jobs=(ended,)), "n1")


def test_what_cannot_be_read_may_hold_a_rank() -> None:
    """The record of a job with a worker there; of any job while the host is silent."""
    here = ClusterView(hosts=(holding("n1", None, "other"),), unread_jobs=("other", "third"))
    silent = ClusterView(unread=("n1",), unread_jobs=("third",))

    assert (unreadable(here, "n1"), is_free(here, "n1")) == (("other",), False)
    assert (unreadable(silent, "n1"), is_free(silent, "n1")) == (("n1", "third"), False)
    assert is_free(ClusterView(unread=("n9",)), "n1")

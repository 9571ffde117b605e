"""Whether a job would survive the next loss at once."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.values import member, plan, record
from tmd.core.planning.planned_moves import obstacle
from tmd.core.planning.readiness import Readiness, readiness, unprotected
from tmd.core.values.model import (
    Activity,
    ClusterView,
    HostStatus,
    JobState,
    Move,
    Phase,
    Rehearsal,
)
from tmd.core.values.requests import DrainRequest
from tmd.testing.clients import worker_status

RECORD = record("h1", "h2")


def standby(host, activity=Activity.STANDBY, **changes):
    status = structs.replace(worker_status(f"{host}/job/0.a", activity=activity), **changes)
    return HostStatus(host, "i", workers=(status,))


def gap(*hosts, of=RECORD, **changes):
    found = unprotected(ClusterView(hosts=hosts, jobs=(of,), **changes), of)
    return None if found is None else (found.ranks, found.why)


def test_a_job_with_a_fit_standby_has_no_gap():
    assert gap(standby("h3")) is None


def test_a_job_without_a_standby_lacks_one_for_each_rank():
    assert gap() == ((0, 1), "the job has no other standby")


def test_a_standby_that_is_unfit_for_some_ranks_leaves_those_open():
    refused = Rehearsal(step=1, seconds=1.0, refusal="other shapes", ranks=(1,))
    done = Rehearsal(step=1, seconds=1.0, ranks=(0,))

    assert gap(standby("h3", rehearsed=(done, refused))) == (
        (1,),
        "not h3/job/0.a: it failed its rehearsal: other shapes",
    )


def test_the_gap_mentions_a_starting_standby():
    assert gap(standby("h3", Activity.STARTING)) == ((0, 1), "1 still starting")


def test_a_drained_standby_is_no_protection():
    ranks, why = gap(standby("h3"), drains=(DrainRequest("h3", "r"),))

    assert ranks == (0, 1)
    assert "tmd undrain h3" in why


@pytest.mark.parametrize("state", [s for s in JobState if s is not JobState.RUNNING])
def test_a_job_that_does_not_run_has_no_gap(state):
    assert gap(of=structs.replace(RECORD, state=state)) is None


@pytest.mark.parametrize("phase", list(Phase))
def test_a_job_with_a_live_plan_has_no_gap(phase):
    """Its joiner is in no pool, which says nothing about the time after the plan."""
    under_way = plan(RECORD.membership, timeline=(), phase=phase)
    live = phase not in (Phase.DONE, Phase.ABORTED)

    assert (gap(of=structs.replace(RECORD, plan=under_way)) is None) == live


def test_many_standbys_are_named_up_to_a_number():
    refused = Rehearsal(step=1, seconds=1.0, refusal="other bits", suspect=True)
    pool = [standby(f"s{n}", rehearsed=(refused,)) for n in range(9)]
    _, why = gap(*pool)

    assert why.count("other bits") == 5
    assert why.endswith("; and 4 more")


# --- what hinders a planned move ------------------------------------------------------------------


def hindered(*hosts, of=RECORD):
    return obstacle(of, ClusterView(hosts=hosts, jobs=(of,)), "h1")


def test_a_move_with_a_standby_is_not_hindered():
    assert hindered(standby("h3")) == ""


def test_a_move_without_one_says_so():
    assert hindered() == (
        "moving the ranks of h1 waits for 1 standby: the job has no other standby"
    )


def test_a_standby_that_failed_in_this_move_before_is_not_counted():
    move = Move(rank=0, leaver=RECORD.membership.members[0], joiner=member("h3"))
    before = plan(RECORD.membership, phase=Phase.ABORTED, moves=(move,), rejected=("h3/job/0.a",))
    again = structs.replace(RECORD, history=(before,))

    assert "it failed as joiner of this move before" in hindered(standby("h3"), of=again)


def test_standbys_are_counted_by_what_is_known_of_them():
    """Ranks without a fit standby are counted also while a plan is live."""
    proved = Rehearsal(step=1, seconds=1.0)
    refused = Rehearsal(step=1, seconds=1.0, refusal="other bits", suspect=True)
    live = structs.replace(RECORD, plan=plan(RECORD.membership, phase=Phase.PREPARE))
    hosts = (
        standby("h3", rehearsed=(proved,)),
        standby("h4"),
        standby("h5"),
        standby("h6", rehearsed=(refused,)),
    )

    assert readiness(ClusterView(hosts=hosts), live) == Readiness(1, 2, 1, ())
    assert readiness(ClusterView(hosts=hosts[3:]), live) == Readiness(0, 0, 1, (0, 1))

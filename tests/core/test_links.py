"""Links break without a dead worker: the peers' reports decide which worker must go."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.values import member, plan, record, worker
from tmd.core.planning.links import IN_VAIN, LINK_BROKEN, all_heard
from tmd.core.planning.migration import PlanFacts
from tmd.core.planning.planning import steer
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import (
    Activity,
    ClusterView,
    HostStatus,
    JobState,
    Membership,
    Phase,
    PlanKind,
)
from tmd.testing.clients import worker_status

STEP = 7
ALL = (0, 1, 2, 3)
CUT = {"h0": ["h3"], "h1": ["h3"], "h2": ["h1"], "h3": ["h0", "h2"]}
"""Workers that each host's worker names; h3 is cut off, and h2 knows of it only from h1."""


HOSTS = tuple(f"h{n}" for n in ALL)
MEMBERSHIP = Membership(2, tuple(map(member, HOSTS)))
BROKE_BEFORE = plan(
    structs.replace(MEMBERSHIP, epoch=1),
    new=MEMBERSHIP,
    kind=PlanKind.FAILOVER,
    phase=Phase.RESUME,
    cause=LINK_BROKEN,
    resume=STEP,
)
RECORD = record(*HOSTS, membership=MEMBERSHIP, proposed=2, plan=BROKE_BEFORE)


NOBODY = {host: [] for host in HOSTS}


def broken_again():
    """The record of a job in which one step broke as often as it is repeated, and always again."""
    plans = [
        structs.replace(
            BROKE_BEFORE,
            phase=Phase.DONE,
            old=structs.replace(MEMBERSHIP, epoch=epoch),
            new=structs.replace(MEMBERSHIP, epoch=epoch + 1),
        )
        for epoch in range(2 - IN_VAIN, 2)
    ]
    return structs.replace(RECORD, plan=plans[-1], history=tuple(plans))


def stuck(host, rank, named, replicas=ALL, step=STEP, epoch=2):
    status = structs.replace(
        worker_status(worker(host)),
        activity=Activity.STUCK,
        rank=rank,
        epoch=epoch,
        step=step,
        replicas=replicas,
        suspects=tuple(worker(other) for other in named),
    )
    return HostStatus(host, "i", workers=(status,))


WAITING = worker_status("s1/job/0.a", activity=Activity.STANDBY, world_size=4)
STANDBY = HostStatus("s1", "i", workers=(WAITING,), standby=True)


def after(named, *, record=RECORD, spare=True, **changes):
    hosts = [stuck(f"h{n}", n, named[f"h{n}"], **changes) for n in ALL]
    view = ClusterView(hosts=(*hosts, STANDBY) if spare else tuple(hosts), jobs=(record,))
    return steer(record, view, (), now=0.0, age=1.0, limits=PlanLimits())


def test_the_worker_that_most_peers_name_is_replaced_the_second_time():
    plan = after(CUT).plan

    assert plan.dead == (worker("h3"),)
    assert plan.cause == LINK_BROKEN
    assert "most of them name it" in plan.reason


def test_the_first_time_the_same_ranks_run_the_step_again():
    assert after(CUT, record=structs.replace(RECORD, plan=None)).plan.dead == ()
    assert after(CUT, step=STEP + 1).plan.dead == ()


@pytest.mark.parametrize(
    "named",
    [
        {"h0": ["h1"], "h1": ["h0"], "h2": [], "h3": []},
        {"h0": ["h3"], "h1": ["h3"], "h2": ["h1"], "h3": ["h1"]},
        {"h0": ["h0"], "h1": ["away/job/0.b"], "h2": [], "h3": []},
    ],
    ids=["word against word", "as many name another", "itself, or nobody of us"],
)
def test_no_worker_is_named_in_doubt(named):
    assert after(named).plan.dead == ()


def test_a_worker_that_has_adopted_ranks_is_one_voice():
    """It would name a worker alone otherwise, whatever number of peers there are."""
    adopting = structs.replace(RECORD, membership=MEMBERSHIP.shrunk({1: 0}))
    one = after({"h0": ["h3"], "h1": [], "h2": [], "h3": []}, record=adopting).plan
    two = after({"h0": ["h3"], "h1": [], "h2": ["h3"], "h3": []}, record=adopting).plan

    assert one.id != BROKE_BEFORE.id
    assert one.dead == ()
    assert two.dead == (worker("h3"),)


def test_workers_are_heard_once_whatever_number_of_ranks_they_hold():
    adopting = structs.replace(RECORD, membership=MEMBERSHIP.shrunk({1: 0}))
    hosts = [stuck(f"h{n}", n, []) for n in (0, 2, 3)]
    some, full = (
        PlanFacts(ClusterView(hosts=tuple(known), jobs=(adopting,)), "job")
        for known in (hosts[:2], hosts)
    )

    assert not all_heard(adopting, some)
    assert all_heard(adopting, full)


def test_a_member_that_gave_its_rank_back_is_not_waited_for():
    """Its state is not verified; it never reports being stuck, and all others have."""
    hosts = [stuck(f"h{n}", n, []) for n in ALL]
    (before,) = hosts[3].workers
    back = structs.replace(before, activity=Activity.STANDBY, rank=None)
    view = ClusterView(hosts=(*hosts[:3], structs.replace(hosts[3], workers=(back,)), STANDBY))
    plan = steer(RECORD, view, (), now=0.0, age=1.0, limits=PlanLimits()).plan

    assert plan.id != BROKE_BEFORE.id
    assert plan.dead == ()


def test_no_worker_with_a_unique_state_or_without_a_standby_is_named():
    """To wait for the cable does less harm."""
    assert after(CUT, replicas=(3,)).plan.dead == ()
    assert after(CUT, spare=False).plan.dead == ()


def test_a_step_that_always_breaks_ends_the_job_unless_a_worker_was_replaced():
    broken = broken_again()
    *others, last = broken.history
    helped = structs.replace(last, dead=(worker("h9"),))

    assert after(NOBODY, record=broken).state is JobState.FAILED
    mixed = structs.replace(broken, history=(*others, helped))
    assert after(NOBODY, record=mixed).state is JobState.RUNNING


def test_breaks_of_an_earlier_step_do_not_count():
    """The last repeat of it went well, perhaps days ago."""
    assert after(NOBODY, record=broken_again(), step=STEP + 1).state is JobState.RUNNING


def test_breaks_of_an_earlier_run_with_the_same_name_do_not_count():
    """Its history is kept. Its last plan led to another membership, or one of them did."""
    ran = broken_again()
    membership = structs.replace(MEMBERSHIP, epoch=ran.membership.epoch + 1)
    new = structs.replace(ran, membership=membership, proposed=membership.epoch, plan=None)
    once = structs.replace(
        ran.history[-1], old=membership, new=structs.replace(membership, epoch=99)
    )
    later = structs.replace(
        new, membership=once.new, plan=once, proposed=99, history=(*ran.history, once)
    )

    # Workers report the epoch in which they are stuck.
    hosts = [stuck(f"h{n}", n, [], epoch=99) for n in ALL]
    for known in (new, later):
        view = ClusterView(hosts=(*hosts, STANDBY), jobs=(known,))
        found = steer(known, view, (), now=0.0, age=1.0, limits=PlanLimits())
        assert found.state is JobState.RUNNING
        assert found.plan.phase is Phase.RECOVER

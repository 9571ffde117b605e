"""What is decided while it is not known yet how a worker ends."""

import pytest
from msgspec import structs

from tests import values
from tmd.core.planning import failover
from tmd.core.planning.migration import PlanFacts
from tmd.core.values.model import ClusterView, Exit, HostStatus, JobState

HOSTS = ("h1", "h2")


def settled(*codes: int | None) -> tuple[JobState, str]:
    """All workers of the job end; what becomes of it, and what is waited for."""
    record = values.record(*HOSTS)
    plan = structs.replace(
        values.failover(record, *map(values.worker, HOSTS)), witnesses=record.membership.members
    )
    record = structs.replace(record, plan=plan)
    hosts = tuple(
        HostStatus(host, "1", exits=(Exit(values.worker(host), record.job, code, 0.0),))
        for host, code in zip(HOSTS, codes, strict=True)
    )
    facts = PlanFacts(ClusterView(hosts=hosts, jobs=(record,)), record.job)
    after, missing = failover.settle(record, plan, facts, (), 0.0)
    return after.state, missing


@pytest.mark.parametrize("codes", [(None, None), (-9, None), (None, -9)])
def test_nobody_is_left_but_somebody_may_have_come_to_the_end(
    codes: tuple[int | None, ...],
) -> None:
    """A script may end with ``os._exit(0)``: that it was no failure is known a moment later."""
    state, missing = settled(*codes)

    assert state is JobState.RUNNING
    assert missing.startswith("waiting to hear how")


def test_nobody_is_left() -> None:
    assert settled(-9, 1)[0] is JobState.FAILED

"""Which statuses a leader reads in a turn."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests import values
from tmd.core.planning.status_reads import AT_ONCE, EVERY_S, next_reads
from tmd.core.values.model import Activity, ClusterView, HostStatus, JobRecord, JobState
from tmd.testing.clients import worker_status

SOME = 10
"""Hosts beyond those that are read as a whole."""


def name(number: int) -> str:
    return f"h{number:05}"


def host(number: int, **changes: object) -> HostStatus:
    status = worker_status(values.worker(name(number)), activity=Activity.TRAINING)
    return structs.replace(HostStatus(name(number), "i", workers=(status,)), **changes)


def cluster(*others: HostStatus, record: JobRecord | None = None) -> ClusterView:
    """Idle hosts, and ``others`` in the place of the first ones."""
    idle = (HostStatus(name(n), "i") for n in range(len(others), AT_ONCE + SOME))
    return ClusterView(hosts=(*others, *idle), jobs=() if record is None else (record,))


def read_meanwhile(view: ClusterView, *urgent: str) -> set[str]:
    """The hosts that are read before the next ones are due."""
    found = next_reads(view, urgent, "", EVERY_S / 2).hosts
    assert found is not None
    return set(found)


def test_a_small_cluster_is_read_as_a_whole() -> None:
    small = ClusterView(hosts=tuple(host(n) for n in range(SOME)))
    assert next_reads(small, (), "", 1.0).hosts is None


@pytest.mark.parametrize(("view", "urgent"), [(None, ()), (cluster(), None)])
def test_all_are_read_if_any_may_have_changed(
    view: ClusterView | None, urgent: tuple[str, ...] | None
) -> None:
    assert next_reads(view, urgent, "", 1.0).hosts is None


def test_each_host_is_read_in_turn() -> None:
    view, last, read = cluster(), "", list[str]()
    for _ in range(3):
        found = next_reads(view, (), last, EVERY_S)
        assert found.hosts is not None
        assert len(found.hosts) == AT_ONCE
        assert next_reads(view, (), found.last, EVERY_S / 2) == (frozenset(), found.last)
        read += sorted(found.hosts, key=lambda host: (host <= last, host))
        last = found.last

    names = [host.host for host in view.hosts]
    assert read == (3 * names)[: len(read)]


def test_the_turn_goes_on_behind_a_host_that_is_gone() -> None:
    found = next_reads(cluster(), (), name(4) + "-gone", EVERY_S)
    assert found.hosts is not None
    assert name(5) in found.hosts
    assert name(4) not in found.hosts


def test_hosts_that_report_a_change_are_read() -> None:
    assert read_meanwhile(cluster(), name(3)) == {name(3)}


def test_hosts_with_findings_are_read_each_time() -> None:
    assert read_meanwhile(cluster(host(0, alerts=(values.alert(),)))) >= {name(0)}


@pytest.mark.parametrize(
    ("changes", "watched"),
    [
        ({}, False),
        ({"state": JobState.FINISHING}, True),
        ({"plan": values.failover(values.record(name(0), name(1)))}, True),
        ({"plan": values.plan(values.record(name(0), name(1)).membership)}, False),
    ],
)
def test_hosts_of_a_job_that_does_not_simply_train_are_read_each_time(
    changes: dict[str, object], *, watched: bool
) -> None:
    record = values.record(name(0), name(1), **changes)
    found = read_meanwhile(cluster(host(0), host(1), record=record))
    assert found == ({name(0), name(1)} if watched else set())


def test_hosts_of_a_job_without_a_record_are_read_each_time() -> None:
    """It is about to form, or its record has another version."""
    assert read_meanwhile(cluster(host(0), host(1))) == {name(0), name(1)}

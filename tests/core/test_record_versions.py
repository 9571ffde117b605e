"""Versions of records while hosts of several releases share a cluster."""

from __future__ import annotations

from msgspec import structs

from tests import values
from tmd.core.planning.election import Denied, GivingWay, Granted
from tmd.core.planning.record_versions import (
    REMEMBERED_S,
    LastHeard,
    recalled,
    remembered,
    successors,
    written_version,
)
from tmd.core.values.model import (
    ADOPTING_VERSION,
    READABLE_VERSION,
    RECORD_VERSION,
    ClusterView,
    HostStatus,
)

EARLIER, LATER = RECORD_VERSION - 1, READABLE_VERSION + 1


def test_a_silent_host_that_was_never_heard_counts_with_what_is_written_for_a_while() -> None:
    """The leader before may have heard it."""
    record = structs.replace(values.record("h0", "h1"), v=EARLIER)
    view = ClusterView(hosts=(HostStatus("h0", "i"),), jobs=(record,))
    heard = remembered({}, view, 100.0)
    later = remembered(heard, view, 101.0 + REMEMBERED_S)

    assert heard["h1"] == LastHeard(EARLIER, 100.0, guessed=True)
    assert written_version(record, view, heard, 100.0) == EARLIER
    assert written_version(record, view, later, 101.0 + REMEMBERED_S) == RECORD_VERSION


def test_a_silent_host_without_a_part_in_the_job_does_not_count() -> None:
    record = structs.replace(values.record("h0"), v=EARLIER)
    view = ClusterView(hosts=(HostStatus("h0", "i"),), jobs=(record,))
    heard = {"s0": LastHeard(EARLIER, 100.0)}

    assert "s0" not in remembered(heard, view, 100.0)
    assert written_version(record, view, heard, 100.0) == RECORD_VERSION


def test_a_silent_host_of_an_earlier_release_is_recalled_for_a_while() -> None:
    """Its daemon may return in a moment, and could not read of a rank that was adopted."""
    record = values.record("h0", "h1", "h2", "h3")
    view = ClusterView(hosts=(HostStatus("h0", "i", reads=ADOPTING_VERSION),), jobs=(record,))
    heard = {
        "h0": LastHeard(ADOPTING_VERSION - 1, 100.0),
        "h1": LastHeard(ADOPTING_VERSION - 1, 100.0),
        "h2": LastHeard(ADOPTING_VERSION, 100.0),
    }
    kept = remembered(heard, view, 101.0)

    assert recalled(view, kept, 101.0).earlier == ("h1",)
    assert recalled(view, kept, 101.0).with_record(record).earlier == ("h1",)
    assert recalled(view, kept, 101.0 + REMEMBERED_S).earlier == ()


def test_a_silent_host_that_was_never_heard_is_not_recalled() -> None:
    """It may have been the leader: its rank is adopted at once."""
    record = values.record("h0", "h1")
    view = ClusterView(hosts=(HostStatus("h0", "i", reads=ADOPTING_VERSION),), jobs=(record,))
    heard = remembered(remembered({}, view, 100.0), view, 101.0)

    assert heard["h1"].reads < ADOPTING_VERSION
    assert recalled(view, heard, 101.0).earlier == ()


def test_a_leader_that_can_read_all_records_has_no_successors() -> None:
    """Hosts whose heartbeats it cannot read are of another release and may read the record."""
    hosts = (HostStatus("h0", "i"), HostStatus("h1", "i", reads=LATER))
    view = ClusterView(hosts=hosts, unread=("h2",), unread_jobs=("job",))

    assert successors(view) == {"h1", "h2"}
    assert successors(ClusterView(hosts=hosts, unread=("h2",))) == frozenset()


def test_a_candidate_that_has_given_way_abstains_while_anybody_leads() -> None:
    """And for a lifetime of a lease after that. Once a host leads to which it gave way it is a
    candidate as any other."""
    way, _ = GivingWay().to(frozenset({"h1"}), now=10.0, ttl_s=9.0)
    later = way.saw("h3#i", 18.0, 9.0)

    assert way.saw("", 18.0, 9.0) == way
    assert (way.rest(19.0), later.rest(19.0), later.rest(27.0)) == (0.0, 8.0, 0.0)
    assert way.saw("h1#i", 18.0, 9.0) == GivingWay()
    assert later.to(frozenset({"h1"}), 30.0, 9.0) == (later, False)


def test_a_candidate_gives_way_again_once_another_has_led() -> None:
    """To the same hosts it does only once, and to a new one at once."""
    way, gives = GivingWay().to(frozenset({"h1"}), now=10.0, ttl_s=9.0)

    assert gives
    assert way.rest(10.0) > 0
    assert way.to(frozenset({"h1"}), 20.0, 9.0) == (way, False)
    assert way.to(frozenset({"h1", "h2"}), 20.0, 9.0)[1]
    assert way.after(Granted(5)) == way
    assert way.after(Denied("h3#i", 5.0)) == way
    assert way.after(Denied("h1#i", 5.0)) == GivingWay()

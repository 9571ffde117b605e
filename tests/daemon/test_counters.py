"""What a daemon counts for its metrics."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.values import alert, failover, plan, record, worker
from tmd.core.planning.goodput import LossCause
from tmd.core.values.model import ClusterView, Mark, Phase, PlanKind, Severity, State
from tmd.daemon.counters import (
    BUCKETS_S,
    GONE_S,
    MOST_CODES,
    OTHER_CODES,
    AlertCounter,
    Histogram,
    JobCounter,
)
from tmd.daemon.loss_ledger import CREDITS

RECORD = record("h1", "h2")
NOBODY = ClusterView()


def in_plan(under_way):
    return structs.replace(RECORD, plan=under_way)


def test_alerts_are_counted_by_code_severity_and_state():
    counter = AlertCounter()
    counter.add(alert(code="nic.down", severity=Severity.FATAL))
    first = dict(counter.counts)
    for state in (State.CLEARED, State.RAISED):
        counter.add(alert(code="nic.down", severity=Severity.FATAL, state=state))

    assert first[("nic.down", Severity.FATAL, State.CLEARED)] == 0

    assert counter.counts == {
        ("nic.down", Severity.FATAL, State.RAISED): 2,
        ("nic.down", Severity.FATAL, State.CLEARED): 1,
    }


def test_a_plug_in_that_invents_codes_does_not_fill_the_memory():
    counter = AlertCounter()
    for number in range(MOST_CODES + 50):
        counter.add(alert(code=f"own.{number}"))
    counter.add(alert(code="own.0"))

    counted = {code: n for (code, _, state), n in counter.counts.items() if state is State.RAISED}
    assert len(counted) == MOST_CODES + 1
    assert (counted[OTHER_CODES], counted["own.0"]) == (50, 2)


def test_a_bucket_holds_what_is_at_most_its_bound():
    histogram = Histogram()
    for seconds in (0.0, BUCKETS_S[0], BUCKETS_S[0] * 1.01, BUCKETS_S[-1] + 1):
        histogram.observe(seconds)
    counts = [count for _, count in histogram.buckets()]

    assert counts[:2] == [2, 3]
    assert counts[-2:] == [3, 4]
    assert [bound for bound, _ in histogram.buckets()][-1] == "+Inf"
    assert histogram.sum_s == pytest.approx(BUCKETS_S[0] * 2.01 + BUCKETS_S[-1] + 1)


def test_a_standstill_is_counted_while_it_lasts():
    """In seconds of all ranks; a hold of hours shows before it is over."""
    counter = JobCounter()
    holding = in_plan(failover(RECORD))
    for now in (100.0, 101.0, 104.0):
        counter.look(holding, NOBODY, now)
    counter.look(RECORD, NOBODY, 105.0)
    counter.look(RECORD, NOBODY, 200.0)

    assert counter.lost == {("job", LossCause.FAILOVER): 10.0}


def test_time_in_which_another_daemon_leads_is_not_counted():
    counter = JobCounter()
    recovering = in_plan(failover(RECORD))
    counter.look(recovering, NOBODY, 0.0)
    counter.follow(())
    counter.look(recovering, NOBODY, 50.0)
    counter.look(recovering, NOBODY, 51.0)

    assert counter.lost == {("job", LossCause.FAILOVER): 2.0}


def test_a_written_revision_counts_phases_ends_and_losses():
    counter = JobCounter()
    begun = plan(RECORD.membership, phase=Phase.PREPARE, timeline=(Mark(Phase.PREPARE, 1.0),))
    done = structs.replace(
        begun,
        phase=Phase.DONE,
        timeline=(*begun.timeline, Mark(Phase.READY, 3.0), Mark(Phase.DONE, 3.5)),
    )
    counter.wrote(RECORD, in_plan(begun), NOBODY)
    counter.wrote(in_plan(begun), in_plan(done), NOBODY)
    lost = structs.replace(failover(RECORD, worker("h2")), id="job-3")
    counter.wrote(in_plan(done), in_plan(lost), NOBODY)

    assert {key for key, n in counter.ended.items() if n} == {(PlanKind.PLANNED, Phase.DONE)}
    sums = {phase: h.sum_s for (_, phase), h in counter.phases.items() if h.sum_s}
    assert sums == {Phase.PREPARE: 2.0, Phase.READY: 0.5}
    assert counter.lost == {("job", LossCause.INTERRUPTED_STEP): 0.0}


def test_what_can_be_known_is_counted_from_zero():
    """Prometheus sees an increase only between two samples."""
    counter = JobCounter()
    counter.keep({"job"}, now=0.0)

    assert set(counter.ended.values()) == {0}
    assert {key for key, _ in counter.ended.items()} == {
        (kind, outcome) for kind in PlanKind for outcome in (Phase.DONE, Phase.ABORTED)
    }
    assert counter.phases == {}
    assert counter.lost == {("job", cause): 0.0 for cause in LossCause}


def test_a_daemon_that_never_leads_shows_no_zeros():
    """A thousand hosts would multiply series that stay at zero for ever."""
    counter = JobCounter(may_lead=False)
    counter.keep({"job"}, now=0.0)

    assert (counter.ended, counter.phases, counter.lost) == ({}, {}, {})


def test_a_job_that_is_gone_is_forgotten_later():
    """Its last loss can still be scraped. One that is back meanwhile goes on from its count."""
    counter = JobCounter()
    for now in (0.0, 1.0):
        counter.look(in_plan(failover(RECORD)), NOBODY, now)
    counter.keep({"job"}, now=1.0)
    counter.keep(set(), now=GONE_S)
    counter.keep({"job"}, now=GONE_S + 1)
    counter.keep(set(), now=2 * GONE_S)
    kept = counter.lost[("job", LossCause.FAILOVER)]
    counter.keep(set(), now=2 * GONE_S + 2)

    assert kept == 2.0
    assert counter.lost == {}


def test_time_in_which_a_record_cannot_be_read_is_not_counted():
    counter = JobCounter()
    recovering = in_plan(failover(RECORD))
    counter.look(recovering, NOBODY, 0.0)
    counter.follow({"other"})
    counter.look(recovering, NOBODY, 50.0)

    assert counter.lost == {}


@pytest.mark.parametrize("stored", [True, False])
def test_lost_time_is_written_once_also_if_the_answer_of_the_store_is_lost(stored):
    """The next look at the record shows whether it was stored."""
    counter = JobCounter()
    recovering = structs.replace(in_plan(failover(RECORD)), lost={"hold": 1.0})
    for now in (0.0, 1.0):
        counter.look(recovering, NOBODY, now)
    tried = counter.ledger.into(structs.replace(recovering, revision=8, lease_epoch=5))
    found = tried if stored else recovering
    counter.look(found, NOBODY, 1.0)
    after = counter.ledger.into(structs.replace(found, revision=9, lease_epoch=5))

    assert after.lost == {"hold": 1.0, "failover": 2.0}


def standing():
    """A counter that has counted two seconds, and the record in which they are not yet."""
    counter = JobCounter()
    record = structs.replace(in_plan(failover(RECORD)), revision=7, lease_epoch=5)
    for now in (0.0, 1.0):
        counter.look(record, NOBODY, now)
    return counter, record


def written(counter, before, epoch):
    """The next revision of ``before`` as the leader of ``epoch`` writes it."""
    return counter.ledger.into(
        structs.replace(before, revision=before.revision + 1, lease_epoch=epoch)
    )


def test_a_write_that_arrives_late_counts_once_and_loses_nothing():
    """It is tried again for the same revision while the first is on its way. What was counted
    meanwhile is added with the next revision."""
    counter, before = standing()
    first = written(counter, before, 5)
    counter.look(before, NOBODY, 2.0)
    again = written(counter, before, 5)
    counter.look(first, NOBODY, 2.0)
    counter.look(first, NOBODY, 3.0)
    after = written(counter, first, 5)

    assert first.lost == again.lost == {"failover": 2.0}
    assert after.lost == {"failover": 6.0}


@pytest.mark.parametrize("stored", [True, False])
def test_lost_time_counts_once_also_if_another_leader_has_written_since(stored):
    """Its record says whether it goes back to the one whose answer was lost."""
    counter, before = standing()
    tried = written(counter, before, 5)
    base = tried if stored else structs.replace(before, revision=8, lease_epoch=6)
    other = structs.replace(base, revision=9, lease_epoch=6)
    counter.look(other, NOBODY, 1.0)
    after = written(counter, other, 7)

    assert after.lost == {"failover": 2.0}


def test_of_two_attempts_for_one_revision_the_stored_one_counts():
    """This host had lost the lease and got it again in between."""
    counter, before = standing()
    first = written(counter, before, 5)
    counter.look(before, NOBODY, 2.0)
    second = written(counter, before, 7)
    counter.look(first, NOBODY, 2.0)
    after = written(counter, first, 7)

    assert (first.lost, second.lost) == ({"failover": 2.0}, {"failover": 4.0})
    assert after.lost == {"failover": 4.0}


def test_a_record_names_a_bounded_number_of_leaders_that_have_added():
    """An attempt of one that is not named any more counts as stored: no loss is shown twice."""
    counter, before = standing()
    written(counter, before, 5)
    later = structs.replace(before, revision=9, lease_epoch=6)
    for epoch in range(6, 30):
        other, _ = standing()
        later = written(other, later, epoch)
    counter.look(later, NOBODY, 1.0)

    assert [c.lease_epoch for c in later.credited] == list(range(30 - CREDITS, 30))
    assert written(counter, later, 30) == structs.replace(
        later, revision=later.revision + 1, lease_epoch=30
    )


def test_nothing_unwritten_is_kept_of_a_job_that_is_gone():
    counter = JobCounter()
    for now in (0.0, 1.0):
        counter.look(in_plan(failover(RECORD)), NOBODY, now)
    counter.keep({"job"}, now=1.0)
    counter.keep(set(), now=2 * GONE_S)

    assert counter.ledger.unwritten() == {}


def test_a_former_leader_does_not_show_what_its_last_write_has_stored():
    """Its answer was lost, and another daemon leads and reads the record."""
    counter, before = standing()
    stored = written(counter, before, 5)
    shown = counter.ledger.unwritten()
    counter.ledger.look({"other": before})
    still = counter.ledger.unwritten()
    counter.ledger.look({stored.job: stored})

    assert stored.lost
    assert shown == still == {stored.job: stored.lost}
    assert counter.ledger.unwritten() == {}

"""Which records a daemon obeys."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.values import failover
from tmd.core.planning.directives import Train as TrainDuty
from tmd.core.planning.election import Receipt
from tmd.core.values.model import JobState
from tmd.daemon.records import MANY, Records, condemned
from tmd.testing.clients import until


def test_a_newer_record_is_obeyed_and_an_older_one_is_not(tmp_path, record):
    records = Records(tmp_path)

    assert records.take(record(revision=2, lease_epoch=5)) is Receipt.NEW
    assert records.take(record(revision=2, lease_epoch=5)) is Receipt.KNOWN
    assert records.take(record(revision=1, lease_epoch=5)) is Receipt.OLDER
    assert records.take(record(revision=3, lease_epoch=6)) is Receipt.NEW
    assert records.take(record(revision=4, lease_epoch=5)) is Receipt.REFUSED
    assert records.jobs["job"].revision == 3


def test_the_fence_survives_a_restart(tmp_path, record):
    """A restarted daemon still refuses the leader it refused before (I5)."""
    Records(tmp_path).take(record(lease_epoch=7))
    again = Records(tmp_path)

    assert again.obeyed == 7
    assert again.take(record(revision=9, lease_epoch=6)) is Receipt.REFUSED
    assert again.take(record(revision=1, lease_epoch=7)) is Receipt.NEW


def test_lease_epochs_of_jobs_that_ended_long_ago_are_forgotten_once_there_are_many(
    tmp_path, record
):
    """Never that of a job that goes on, or the highest, which the next lease must exceed."""
    records = Records(tmp_path)
    for number in range(MANY):
        ended = record(job=f"old-{number}", state=JobState.FINISHED, lease_epoch=5)
        records.take(ended)
        records.forget(ended.job)
    records.keep_epochs(["listed"])
    few = len(records._obeyed)
    records.take(record(job="goes-on", lease_epoch=6))
    records.take(record(job="listed", state=JobState.FINISHED, lease_epoch=7))
    for name in ("highest", "as high"):
        records.take(record(job=name, state=JobState.FINISHED, lease_epoch=8))
        records.forget(name)
    records.keep_epochs(["listed"])
    again = Records(tmp_path)

    assert few == MANY
    assert again._obeyed == {"goes-on": 6, "listed": 7, "highest": 8}


async def test_a_lease_epoch_outlives_a_disk_that_was_full(tmp_path, record):
    there = tmp_path / "state"
    records = Records(there)
    records.take(record(lease_epoch=7))
    there.mkdir()
    await until(lambda: records.keep_epochs([]) or Records(there).obeyed == 7, within_s=30)

    assert Records(there).obeyed == 7


def test_one_job_does_not_fence_another(tmp_path, record):
    records = Records(tmp_path)
    records.take(record(lease_epoch=7))

    assert records.take(record(job="other", lease_epoch=3)) is Receipt.NEW


@pytest.mark.parametrize(
    "text",
    [
        b"[1, 2",
        b"[]",
        b'{"j": null}',
        b'{"j": Infinity}',
        b'{"j": {}}',
        b"\xff",
        b"[" * 100_000,
        b'{"j": %s}' % (b"[" * 100_000),
    ],
)
def test_a_damaged_file_is_ignored(tmp_path, record, text):
    (tmp_path / "obeyed.json").write_bytes(text)

    assert Records(tmp_path).take(record()) is Receipt.NEW


def test_orders_follow_from_the_record(tmp_path, record):
    records = Records(tmp_path)
    nothing = records.order("job", "h1/job/0.a")
    records.take(record(revision=3, lease_epoch=7))
    order = records.order("job", "h1/job/0.a")

    assert nothing is None
    assert (order.lease_epoch, order.revision) == (7, 3)
    assert order.directive == TrainDuty(membership=record().membership, rank=0)


def test_only_workers_named_dead_are_condemned(record):
    plain = record()
    named = structs.replace(plain, plan=failover(plain, "h1/job/0.a"))
    over = structs.replace(plain, history=(failover(plain, "h1/job/0.a"),))

    assert condemned(plain, "h1/job/0.a") is None
    assert "silent" in (condemned(named, "h1/job/0.a") or "")
    assert condemned(named, "h2/job/0.a") is None
    assert condemned(over, "h1/job/0.a") is not None

"""Bookkeeping about the workers of a host."""

from __future__ import annotations

import pytest
from msgspec import structs

from tmd.core.values.model import Activity, Exit
from tmd.daemon.roster import EXITS_KEPT, QUIET_FIELDS, Roster, is_urgent
from tmd.testing.clients import worker_status

STATUS = worker_status("h1/job/0.a")


async def rung(roster):
    return await roster.urgent.wait(0)


async def test_news_is_urgent_and_progress_is_not():
    roster = Roster()
    roster.report(STATUS, 0.0)
    new = await rung(roster)
    roster.report(structs.replace(STATUS, step=5, loss=1.5), 1.0)
    progress = await rung(roster)
    roster.report(structs.replace(STATUS, step=5, activity=Activity.STUCK), 2.0)
    stuck = await rung(roster)

    assert (new, progress, stuck) == (True, False, True)
    assert roster.statuses[0].activity is Activity.STUCK


@pytest.mark.parametrize("field", ["activity", "epoch", "armed", "plan", "undecided", "suspects"])
def test_every_field_that_the_leader_uses_is_urgent(field):
    changed = {"activity": Activity.STUCK, "undecided": True, "plan": "p", "suspects": ("w",)}
    after = structs.replace(STATUS, **{field: changed.get(field, 7)})

    assert field not in QUIET_FIELDS
    assert is_urgent(STATUS, after)


async def test_a_worker_that_exited_does_not_come_back():
    """A late report, or the same exit again, does not bring it back."""
    roster = Roster()
    roster.report(STATUS, 0.0)
    await rung(roster)
    exit_ = Exit(STATUS.worker, "job", -9, at=0.0)
    roster.exited(exit_)
    rang = await rung(roster)
    roster.exited(exit_)
    roster.report(STATUS, 1.0)

    assert rang
    assert not await rung(roster)
    assert (roster.statuses, list(roster.exits)) == ((), [exit_])


async def test_an_exiting_worker_only_reports_its_exit_code():
    """The cluster learns of both events; the first one gives the time."""
    roster = Roster()
    roster.report(STATUS, 0.0)
    await rung(roster)
    rang = []
    for exit_ in (
        Exit(STATUS.worker, "job", None, at=1.0),
        Exit(STATUS.worker, "job", None, at=2.0),
        Exit(STATUS.worker, "job", -9, at=3.0),
        Exit(STATUS.worker, "job", None, at=4.0),
        Exit(STATUS.worker, "job", 1, at=5.0),
    ):
        roster.exited(exit_)
        roster.report(STATUS, exit_.at)
        (known,) = roster.exits
        rang.append((await rung(roster), known.code, known.at, roster.ended(STATUS.worker)))

    assert rang == [
        (True, None, 1.0, False),
        (False, None, 1.0, False),
        (True, -9, 1.0, True),
        (False, -9, 1.0, True),
        (False, -9, 1.0, True),
    ]
    assert roster.statuses == ()


async def test_a_lost_connection_is_no_exit():
    roster = Roster()
    roster.report(STATUS, 0.0)
    roster.lost(STATUS.worker, 1.0)

    assert roster.statuses == (STATUS,)
    assert not roster.workers[STATUS.worker].connected


async def test_the_exits_of_all_workers_of_a_large_host_are_kept():
    """A job has ended well only once all of them are known."""
    roster = Roster()
    names = [f"h1/job/{number}.a" for number in range(EXITS_KEPT + 36)]
    for name in names:
        roster.report(worker_status(name), 0.0)
    for name in names:
        roster.exited(Exit(name, "job", 0, at=0.0))

    assert [known.worker for known in roster.exits] == names


async def test_exits_are_bounded_and_their_end_is_told():
    roster = Roster()
    feed = roster.subscribe(0.0)
    for number in range(EXITS_KEPT + 1):
        roster.exited(Exit(f"w{number}", "job", 1, at=0.0))
    events = {}
    for _ in range(EXITS_KEPT + 1):
        event = await feed.take()
        events[event.worker] = event

    assert len(roster.exits) == EXITS_KEPT
    assert events["w0"].forgotten
    assert not events["w1"].forgotten


async def test_a_slow_reader_gets_the_latest_of_each_worker():
    roster = Roster()
    feed = roster.subscribe(0.0)
    other = worker_status("h1/job/1.a")
    for step in range(100):
        roster.report(structs.replace(STATUS, epoch=step), float(step))
        roster.report(structs.replace(other, epoch=step), float(step))
    events = [await feed.take(), await feed.take()]

    assert [e.status.epoch for e in events] == [99, 99]


async def test_silence_excludes_the_daemons_own_stalls():
    roster = Roster()
    roster.report(STATUS, 10.0)
    feed = roster.subscribe(13.0)
    silent = (await feed.take()).silent_s
    roster.excuse(3.0)
    roster.repeat(13.0)

    assert silent == 3.0
    assert (await feed.take()).silent_s == 0.0

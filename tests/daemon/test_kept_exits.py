"""Exits of workers that a restarted daemon still knows."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from tests.daemon.tasks import running
from tmd.core.values.model import Exit
from tmd.daemon.kept_exits import LOOK_S, KeptExits
from tmd.daemon.roster import Roster
from tmd.testing.clients import worker_status

pytestmark = pytest.mark.looptime

ENDED = Exit("h1/job/0.a", "job", 0, at=1.0)
KILLED = Exit("h1/job/1.a", "job", -9, at=2.0)
ENDING = Exit("h1/job/2.a", "job", None, at=3.0)


async def test_a_restarted_daemon_knows_who_has_ended(tmp_path):
    """Rank 0 of a job still saves, and the launchers of the others have ended. One whose process
    the kernel still ends is not known: its launcher says so again."""
    roster = Roster()
    async with running(KeptExits(roster, tmp_path)):
        roster.exited(ENDED)
        await asyncio.sleep(2 * LOOK_S)
        roster.exited(KILLED)
        roster.exited(ENDING)
    again = Roster()
    KeptExits(again, tmp_path)

    assert list(again.exits) == [ENDED, KILLED]
    assert again.ended(ENDED.worker)
    assert not again.is_ending(ENDING.worker)


async def test_detectors_hear_of_an_exit_once(tmp_path):
    """A person may have cleared the finding since."""
    roster = Roster()
    roster.exited(KILLED)
    KeptExits(roster, tmp_path).keep()
    again = Roster()
    KeptExits(again, tmp_path)
    again.exited(KILLED)
    feed = again.subscribe(0.0)
    again.report(worker_status("h1/job/3.a"), 0.0)
    again.exited(structs.replace(ENDED, code=1))

    assert [(await feed.take()).worker for _ in range(2)] == ["h1/job/3.a", ENDED.worker]


def test_a_damaged_file_is_no_obstacle(tmp_path):
    (tmp_path / "exits.json").write_text("{nonsense")
    roster = Roster()
    kept = KeptExits(roster, tmp_path)
    roster.exited(ENDED)
    kept.keep()

    assert [e.worker for e in roster.exits] == [ENDED.worker]
    assert "nonsense" not in (tmp_path / "exits.json").read_text()


def test_as_many_exits_are_kept_as_the_host_had_workers(tmp_path):
    roster = Roster()
    for n in range(100):
        roster.report(worker_status(f"h1/job/{n}.a"), 0.0)
    for n in range(100):
        roster.exited(Exit(f"h1/job/{n}.a", "job", 0, at=1.0))
    KeptExits(roster, tmp_path).keep()
    again = Roster()
    KeptExits(again, tmp_path)
    again.exited(ENDED)

    assert len(again.exits) == 100
    assert again.ended("h1/job/1.a")

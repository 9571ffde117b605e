"""What becomes of findings when a daemon, or its host, starts again."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.core.test_triage import AGAIN, OF_HOST, come_and_go
from tmd.core.alerts.findings import BANNED, DAY_S, FindingMemory
from tmd.core.alerts.restarts import LARGEST, REBOOTED_S, RESTATED_S
from tmd.core.alerts.triage import FindingsBoard, declared_healthy, fold, restored, ripened
from tmd.core.values.model import Severity, State
from tmd.core.values.requests import HealthyRequest


def started(before, lasting_s=0.0, boot=""):
    """The board of a daemon that was started again, and has run for some time."""
    board = restored(before.lasting, "h1", boot)
    for clock in (0.0, lasting_s):
        board, _ = ripened(board, now=clock, clock=clock)
    return board


def test_a_finding_that_stood_before_a_restart_has_not_come_back():
    """Its detector states it again at each start; that is no recurrence, and no new alert: its
    subscribers know it by its id."""
    board, published = FindingsBoard(), []
    for start in range(6):
        board, news = fold(
            started(board), OF_HOST, AGAIN, alert_id=f"{start}", now=start, clock=0.0
        )
        published += news
        assert [(a.id, a.at) for a in board.alerts] == [("0", 0)]
    assert len(published) == 1
    over, _ = fold(
        board,
        structs.replace(OF_HOST, state=State.CLEARED),
        AGAIN,
        alert_id="o",
        now=9.0,
        clock=0.0,
    )

    assert len(board.memory.raises) == 1
    assert started(over).memory.stood == ()


def test_a_finding_that_came_back_often_is_still_as_grave_after_a_restart():
    warning = structs.replace(OF_HOST, severity=Severity.WARNING)
    board, _ = come_and_go(warning, (0, 1, 2, 3))
    board, _ = fold(board, warning, AGAIN, alert_id="x", now=4.0, clock=0.0)
    before = {a.severity for a in board.alerts}
    board, _ = fold(started(board), warning, AGAIN, alert_id="y", now=5.0, clock=0.0)

    assert {a.severity for a in board.alerts} == before == {Severity.DEGRADED}


def test_a_fault_that_returns_after_each_repair_has_come_back():
    """The daemon is stopped for the repair, and its detectors find the host sound afterwards."""
    board, raised = FindingsBoard(), []
    for repair in range(4):
        at = repair * DAY_S
        board = started(board, lasting_s=RESTATED_S)
        board, news = fold(
            board, OF_HOST, AGAIN, alert_id=f"{repair}", now=at, clock=RESTATED_S + 1
        )
        raised += [a.code for a in news]

    assert BANNED in raised


def test_a_ban_that_an_operator_has_lifted_does_not_return_with_a_restart():
    board, _ = come_and_go(OF_HOST, (0, 1, 2))
    board, _ = fold(board, OF_HOST, AGAIN, alert_id="x", now=3 * DAY_S, clock=0.0)
    banned = {a.code for a in board.alerts}
    board, _ = declared_healthy(board, HealthyRequest("h1", "r", BANNED, "ann"), now=0.0)
    board, _ = fold(started(board), OF_HOST, AGAIN, alert_id="y", now=3 * DAY_S, clock=0.0)

    assert banned == {"a.b", BANNED}
    assert {a.code for a in board.alerts} == {"a.b"}


def test_a_finding_that_has_become_worse_during_a_restart_is_news():
    board, _ = fold(FindingsBoard(), OF_HOST, AGAIN, alert_id="1", now=4.0, clock=0.0)
    fatal = structs.replace(OF_HOST, severity=Severity.FATAL)
    board, news = fold(started(board), fatal, AGAIN, alert_id="2", now=9.0, clock=0.0)

    assert [(a.id, a.at, a.worse_at, a.severity) for a in news] == [("1", 4.0, 9.0, Severity.FATAL)]


@pytest.mark.parametrize("job", ["", "j"])
def test_a_finding_that_is_not_stated_again_is_over(job):
    """It has ended while no daemon ran. Its subscribers learn that by the id they know."""
    mine = structs.replace(OF_HOST, job=job)
    board, _ = fold(FindingsBoard(), mine, AGAIN, alert_id="1", now=4.0, clock=0.0)
    early = started(board, lasting_s=RESTATED_S - 1)
    late, news = ripened(early, now=500.0, clock=RESTATED_S)

    assert len(early.memory.stood) == 1
    assert [(a.id, a.state, a.at, a.job) for a in news] == [("1", State.CLEARED, 500.0, job)]
    assert late.memory.stood == ()


def test_a_ban_is_not_over_with_the_restart():
    """No detector states it."""
    board, _ = come_and_go(OF_HOST, (0, 1, 2))
    after = started(board, lasting_s=RESTATED_S)

    assert [a.code for a in after.alerts] == [BANNED]
    assert after.memory.stood == ()


def test_a_finding_whose_hold_time_runs_is_not_over():
    held = structs.replace(AGAIN, rules=structs.replace(AGAIN.rules, hold_s=60.0))
    board, _ = fold(FindingsBoard(), OF_HOST, AGAIN, alert_id="1", now=4.0, clock=0.0)
    board = started(board, lasting_s=RESTATED_S - 1)
    board, _ = fold(board, OF_HOST, held, alert_id="2", now=5.0, clock=RESTATED_S - 1)
    board, early = ripened(board, now=6.0, clock=RESTATED_S + 1)
    board, _ = ripened(board, now=7.0, clock=RESTATED_S + 60)

    assert early == ()
    assert [(a.id, a.at) for a in board.alerts] == [("1", 4.0)]


@pytest.mark.parametrize(("boot", "times"), [("one", 1), ("another", 4)])
def test_a_fault_that_the_first_load_after_each_boot_brings_back_recurs(boot, times):
    """It comes minutes after the boot, and may stand until the next."""
    memory = FindingMemory(boot="one")
    board, after_s = FindingsBoard(memory=memory), REBOOTED_S + 1
    for number in range(4):
        board = started(board, lasting_s=after_s, boot=f"{boot}{number}" if times > 1 else boot)
        board, _ = fold(board, OF_HOST, AGAIN, alert_id=f"{number}", now=number, clock=after_s)

    assert len(board.memory.raises) == times
    assert (BANNED in {a.code for a in board.alerts}) is (times > 1)


def test_what_an_earlier_release_has_written_is_read():
    """It kept no id: the finding is no recurrence, but a new alert. It gets what it can read."""
    board, _ = fold(FindingsBoard(), OF_HOST, AGAIN, alert_id="1", now=4.0, clock=0.0)
    memory = structs.replace(board.lasting, stood=(), boot="")
    board, news = fold(restored(memory, "h1"), OF_HOST, AGAIN, alert_id="2", now=9.0, clock=0.0)

    assert [(a.id, a.at) for a in news] == [("2", 9.0)]
    assert len(board.memory.raises) == 1
    assert [key.code for key in board.lasting.standing] == ["a.b"]


def test_a_declaration_of_health_ends_what_is_not_stated_again_yet():
    board, _ = fold(FindingsBoard(), OF_HOST, AGAIN, alert_id="1", now=4.0, clock=0.0)
    board, news = declared_healthy(started(board), HealthyRequest("h1", "r", "", "ann"), now=9.0)

    assert (news[0].id, news[0].state) == ("1", State.CLEARED)
    assert "a.b" in news[-1].message
    assert board.memory.stood == ()


def test_no_more_than_a_bounded_number_is_kept():
    board = FindingsBoard()
    for number in range(LARGEST + 1):
        one = structs.replace(OF_HOST, entity=f"gpu:{number}")
        own = structs.replace(AGAIN, detector=f"d{number // 50}")
        board, _ = fold(board, one, own, alert_id=f"{number}", now=1.0, clock=0.0)

    assert len(board.lasting.stood) == len(board.lasting.standing) == LARGEST

"""From signals to alerts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tmd.core.alerts.findings import (
    BANNED,
    DAY_S,
    DECLARED,
    LEADER,
    FindingRules,
    Origin,
    declared_code,
)
from tmd.core.alerts.triage import FindingsBoard, declared_healthy, restored, ripened
from tmd.core.alerts.triage import fold as fold_all
from tmd.core.values.model import Severity, Signal, State, Strategy
from tmd.core.values.requests import HealthyRequest

ORIGIN = Origin(host="h1", detector="d", strategy=Strategy.ACT)
SIGNAL = Signal(code="a.b", entity="gpu:0", severity=Severity.DEGRADED, message="m", job="j")


def fold(board, signal, origin, *, alert_id, now, clock=0.0):
    """The board, and the one published alert, if any."""
    board, news = fold_all(board, signal, origin, alert_id=alert_id, now=now, clock=clock)
    assert len(news) <= 1
    return board, news[0] if news else None


def test_a_new_finding_is_news_and_is_kept():
    board, news = fold(FindingsBoard(), SIGNAL, ORIGIN, alert_id="1", now=5.0)

    assert news is not None
    assert (news.id, news.host, news.detector, news.code) == ("1", "h1", "d", "a.b")
    assert (news.state, news.count, news.job, news.at) == (State.RAISED, 1, "j", 5.0)
    assert news.strategy is Strategy.ACT
    assert board.alerts == (news,)


def test_one_signal_of_a_storm_counts_all_occurrences():
    storm = structs.replace(SIGNAL, count=800_000)
    board, news = fold(FindingsBoard(), SIGNAL, ORIGIN, alert_id="1", now=5.0)
    board, more = fold(board, storm, ORIGIN, alert_id="2", now=6.0)

    assert (news.count, more) == (1, None)
    assert [a.count for a in board.alerts] == [800_001]


def test_a_repetition_only_counts():
    board, _ = fold(FindingsBoard(), SIGNAL, ORIGIN, alert_id="1", now=5.0)
    board, news = fold(board, SIGNAL, ORIGIN, alert_id="2", now=6.0)

    assert news is None
    assert [(a.id, a.count) for a in board.alerts] == [("1", 2)]


def test_a_worse_repetition_is_news_under_the_same_id():
    board, _ = fold(FindingsBoard(), SIGNAL, ORIGIN, alert_id="1", now=5.0)
    worse = structs.replace(SIGNAL, severity=Severity.FATAL)
    board, news = fold(board, worse, ORIGIN, alert_id="2", now=6.0)
    board, milder = fold(board, SIGNAL, ORIGIN, alert_id="3", now=7.0)

    assert news is not None
    assert (news.id, news.severity) == ("1", Severity.FATAL)
    assert milder is None
    assert board.alerts[0].severity is Severity.FATAL


def test_a_finding_keeps_the_time_of_its_raise_and_has_that_of_its_severity():
    """A later repetition that is no worse changes neither."""
    board, raised = fold(FindingsBoard(), SIGNAL, ORIGIN, alert_id="1", now=5.0)
    worse = structs.replace(SIGNAL, severity=Severity.FATAL)
    board, news = fold(board, worse, ORIGIN, alert_id="2", now=6.0)
    board, _ = fold(board, worse, ORIGIN, alert_id="3", now=7.0)

    assert (raised.worse_at, raised.reached_at) == (None, 5.0)
    assert [(a.at, a.worse_at, a.reached_at) for a in (news, *board.alerts)] == [
        (5.0, 6.0, 6.0)
    ] * 2


def test_clearing_is_news_and_ends_the_finding():
    board, raised = fold(FindingsBoard(), SIGNAL, ORIGIN, alert_id="1", now=5.0)
    cleared = structs.replace(SIGNAL, state=State.CLEARED, message="")
    board, news = fold(board, cleared, ORIGIN, alert_id="2", now=9.0)

    assert raised is not None
    assert news == structs.replace(raised, state=State.CLEARED, at=9.0)
    assert board.alerts == ()


def test_clearing_an_unknown_finding_changes_nothing():
    cleared = structs.replace(SIGNAL, state=State.CLEARED)

    assert fold(FindingsBoard(), cleared, ORIGIN, alert_id="1", now=0.0) == (FindingsBoard(), None)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.sampled_from(["x", "y"]),
            st.sampled_from(list(Severity)),
            st.sampled_from(list(State)),
        )
    )
)
def test_news_alone_rebuilds_the_board(signals):
    """A reader of alerts alone knows what is raised; ids are unique per raise."""
    board, severities, ids = FindingsBoard(), {}, []
    for number, (code, entity, severity, state) in enumerate(signals):
        signal = Signal(code=code, entity=entity, severity=severity, state=state)
        board, news = fold(board, signal, ORIGIN, alert_id=str(number), now=float(number))
        if news is None:
            continue
        key = (news.code, news.entity)
        if news.state is State.RAISED:
            ids += [] if key in severities else [news.id]
            severities[key] = news.severity
        else:
            del severities[key]

    assert {(a.code, a.entity): a.severity for a in board.alerts} == severities
    assert len(set(ids)) == len(ids)


# --- hold -----------------------------------------------------------------------------------------

HOLDING = structs.replace(ORIGIN, rules=FindingRules(hold_s=10.0))
CLEAR = structs.replace(SIGNAL, state=State.CLEARED)


def test_a_finding_that_ends_within_its_hold_time_is_not_raised():
    board, early = fold(FindingsBoard(), SIGNAL, HOLDING, alert_id="1", now=0.0, clock=100.0)
    board, over = fold(board, CLEAR, HOLDING, alert_id="2", now=0.0, clock=109.0)
    board, late = ripened(board, now=0.0, clock=200.0)

    assert (early, over, late) == (None, None, ())
    assert board == FindingsBoard()


def test_a_finding_that_holds_is_raised_without_a_further_signal():
    """Once, under its first id and with the latest message."""
    board, _ = fold(FindingsBoard(), SIGNAL, HOLDING, alert_id="1", now=0.0, clock=100.0)
    worse = structs.replace(SIGNAL, severity=Severity.FATAL)
    board, early = fold(board, worse, HOLDING, alert_id="2", now=1.0, clock=109.9)
    board, (news,) = ripened(board, now=2.0, clock=110.0)

    assert early is None
    assert (news.id, news.count, news.severity, news.at) == ("1", 2, Severity.FATAL, 2.0)
    assert ripened(board, now=3.0, clock=500.0) == (board, ())


def test_a_wall_clock_step_does_not_affect_the_hold_time():
    board, _ = fold(FindingsBoard(), SIGNAL, HOLDING, alert_id="1", now=1e9, clock=0.0)

    assert ripened(board, now=2e9, clock=9.9)[1] == ()
    assert len(ripened(board, now=0.0, clock=10.0)[1]) == 1


def test_two_hosts_do_not_share_a_finding():
    other = structs.replace(ORIGIN, host="h2")
    board, _ = fold(FindingsBoard(), SIGNAL, ORIGIN, alert_id="1", now=0.0)
    board, news = fold(board, SIGNAL, other, alert_id="2", now=0.0)

    assert news is not None
    assert len(board.alerts) == 2


# --- recurring findings ---------------------------------------------------------------------------

AGAIN = structs.replace(ORIGIN, rules=FindingRules(repeats=3, window_s=7 * DAY_S))
OF_HOST = structs.replace(SIGNAL, job="")


def come_and_go(signal, days, origin=AGAIN):
    """Raised and cleared on each of ``days``; returns the board, and all raised alerts."""
    board, raised = FindingsBoard(), []
    over = structs.replace(signal, state=State.CLEARED)
    for number, day in enumerate(days):
        at = day * DAY_S
        board, news = fold_all(board, signal, origin, alert_id=str(number), now=at, clock=0.0)
        raised += news
        board, _ = fold_all(board, over, origin, alert_id="x", now=at, clock=0.0)
    return board, raised


def test_a_warning_that_comes_back_is_degraded_and_says_so():
    warning = structs.replace(OF_HOST, severity=Severity.WARNING)
    _, raised = come_and_go(warning, (0, 1, 2))

    assert [a.severity for a in raised] == [Severity.WARNING] * 2 + [Severity.DEGRADED]
    assert [a.stated for a in raised] == [None, None, Severity.WARNING]
    assert "raised 3 times" in raised[2].evidence


def test_outside_of_the_window_it_starts_anew():
    warning = structs.replace(OF_HOST, severity=Severity.WARNING)
    _, raised = come_and_go(warning, (0, 1, 9, 10))

    assert {a.severity for a in raised} == {Severity.WARNING}


def test_a_host_that_fails_again_and_again_is_banned_until_a_person_clears_it():
    board, raised = come_and_go(OF_HOST, (0, 1, 2, 3))
    ban = raised[3]
    after = restored(board.memory, "h1")

    assert [a.code for a in raised] == ["a.b", "a.b", "a.b", BANNED, "a.b"]
    assert "tmd set-healthy h1" in ban.message
    assert board.alerts == after.alerts == (ban,)
    lifted, _ = declared_healthy(after, HealthyRequest("h1", "r", "", "ann"), now=0.0)
    assert (lifted.alerts, restored(lifted.memory, "h1").alerts) == ((), ())


@pytest.mark.parametrize(
    ("signal", "origin"),
    [
        (SIGNAL, AGAIN),
        (structs.replace(OF_HOST, severity=Severity.WARNING), AGAIN),
        (structs.replace(OF_HOST, severity=Severity.INFO), AGAIN),
        (OF_HOST, structs.replace(AGAIN, strategy=Strategy.ADVISE)),
        (OF_HOST, structs.replace(AGAIN, strategy=Strategy.OBSERVE)),
        (OF_HOST, ORIGIN),
    ],
    ids=["about a worker", "warning", "info", "advise", "observe", "switched off"],
)
def test_no_host_is_banned_for_lesser_findings(signal, origin):
    board, raised = come_and_go(signal, range(6), origin)

    assert {a.code for a in raised} == {"a.b"}
    assert board.memory.ban is None


def test_different_findings_do_not_add_up():
    board = FindingsBoard()
    for number in range(6):
        signal = structs.replace(OF_HOST, entity=f"gpu:{number}")
        board, _ = fold(board, signal, AGAIN, alert_id=str(number), now=0.0)

    assert board.memory.ban is None


# --- declarations of health -----------------------------------------------------------------------


def test_a_declaration_of_health_ends_findings_and_is_recorded():
    board, _ = fold(FindingsBoard(), SIGNAL, ORIGIN, alert_id="1", now=1.0)
    board, _ = fold(board, structs.replace(SIGNAL, code="c"), ORIGIN, alert_id="2", now=1.0)
    board, news = declared_healthy(board, HealthyRequest("h1", "r", "c", "ann"), now=9.0)

    assert [a.code for a in board.alerts] == ["a.b"]
    assert [(a.id, a.code, a.state) for a in news] == [
        ("2", "c", State.CLEARED),
        ("h1-healthy-r", DECLARED, State.CLEARED),
    ]
    assert all("ann" in a.message and a.at == 9.0 for a in news)
    assert declared_code(news[-1]) == "c"


def test_a_declaration_of_health_is_recorded_even_without_findings():
    board, news = declared_healthy(FindingsBoard(), HealthyRequest("h1", "r", "", ""), now=9.0)

    assert [(a.code, declared_code(a)) for a in news] == [(DECLARED, "")]
    assert board == FindingsBoard()


@pytest.mark.parametrize("code", ["", "a.b"])
def test_a_declaration_of_health_leaves_the_findings_of_the_leader(code):
    """They are about the cluster, and the leader reports each once."""
    own, held = structs.replace(ORIGIN, detector=LEADER), FindingRules(hold_s=60.0)
    board, _ = fold(FindingsBoard(), SIGNAL, own, alert_id="1", now=1.0)
    later = structs.replace(SIGNAL, entity="job:j")
    board, _ = fold(board, later, structs.replace(own, rules=held), alert_id="2", now=1.0)
    after, news = declared_healthy(board, HealthyRequest("h1", "r", code, "ann"), now=9.0)

    assert (after.alerts, after.suspects) == (board.alerts, board.suspects)
    assert len(board.suspects) == 1
    assert [a.code for a in news] == [DECLARED]


def test_the_end_of_a_ban_forgets_the_history_of_its_cause():
    """Else the next raise would ban the host again. Other findings keep theirs."""
    other = structs.replace(OF_HOST, code="other")
    board, _ = come_and_go(OF_HOST, (0, 1, 2))
    board, _ = fold_all(board, other, AGAIN, alert_id="o", now=3.0, clock=0.0)
    lifted, _ = declared_healthy(board, HealthyRequest("h1", "r", BANNED, "the leader"), now=9.0)
    again, _ = fold_all(lifted, OF_HOST, AGAIN, alert_id="x", now=10.0, clock=0.0)

    assert [r.key.code for r in lifted.memory.raises] == ["other"]
    assert BANNED not in {a.code for a in again.alerts}


def test_a_declaration_about_one_code_keeps_the_ban():
    board, _ = come_and_go(OF_HOST, (0, 1, 2))
    board, _ = declared_healthy(board, HealthyRequest("h1", "r", "a.b", "ann"), now=9.0)

    assert [a.code for a in board.alerts] == [BANNED]
    assert board.memory.raises == ()


def test_a_finding_seen_after_a_declaration_of_health_is_raised_again():
    board, _ = fold(FindingsBoard(), SIGNAL, ORIGIN, alert_id="1", now=1.0)
    board, _ = declared_healthy(board, HealthyRequest("h1", "r", "", "ann"), now=9.0)
    board, news = fold(board, SIGNAL, ORIGIN, alert_id="2", now=10.0)

    assert news is not None
    assert news.id == "2"


@pytest.mark.parametrize(
    ("at", "code", "ended", "kept"),
    [
        (1000.0, "", ["a.b", "new"], ""),
        (400.0, "", ["a.b"], "; raised since, and kept: new"),
        (400.0, "new", [], "; raised since, and kept: new"),
        (0.0, "", ["a.b", "new"], ""),
    ],
    ids=["at once", "late", "late, one code", "of an earlier release"],
)
def test_a_declaration_that_is_served_late_keeps_what_is_newer(at, code, ended, kept):
    """The operator has not seen it: the daemon was down, or cut off from Redis."""
    board, _ = fold(FindingsBoard(), SIGNAL, ORIGIN, alert_id="1", now=100.0)
    new = structs.replace(SIGNAL, code="new")
    board, _ = fold(board, new, ORIGIN, alert_id="2", now=900.0)
    board, news = declared_healthy(board, HealthyRequest("h1", "r", code, "ann", at), now=1000.0)

    assert [a.code for a in news[:-1]] == ended
    assert news[-1].message.endswith(kept)
    again, more = declared_healthy(board, HealthyRequest("h1", "r", code, "ann", at), now=2000.0)
    assert again == board
    assert [a.code for a in more] == [DECLARED]


def test_a_declaration_that_is_served_late_keeps_what_has_become_worse_since():
    board, _ = fold(FindingsBoard(), SIGNAL, ORIGIN, alert_id="1", now=100.0)
    fatal = structs.replace(SIGNAL, severity=Severity.FATAL)
    board, _ = fold(board, fatal, ORIGIN, alert_id="2", now=900.0)
    board, _ = declared_healthy(board, HealthyRequest("h1", "r", "", "ann", 400.0), now=1000.0)

    assert [a.severity for a in board.alerts] == [Severity.FATAL]


def test_a_declaration_that_is_served_late_keeps_what_is_not_raised_yet():
    """Its detector states it once."""
    held = structs.replace(ORIGIN, rules=FindingRules(hold_s=60.0))
    board, _ = fold(FindingsBoard(), SIGNAL, held, alert_id="1", now=990.0)
    late, _ = declared_healthy(board, HealthyRequest("h1", "r", "", "ann", 400.0), now=1000.0)
    in_time, _ = declared_healthy(board, HealthyRequest("h1", "r", "", "ann", 995.0), now=1000.0)

    assert (len(late.suspects), len(in_time.suspects)) == (1, 0)

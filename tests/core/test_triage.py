"""From signals to alerts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tmd.core.model import Severity, Signal, State, Strategy
from tmd.core.triage import Board, Origin, fold

ORIGIN = Origin(host="h1", detector="d", strategy=Strategy.ACT)
SIGNAL = Signal(code="a.b", entity="gpu:0", severity=Severity.DEGRADED, message="m", job="j")


def test_a_new_finding_is_news_and_is_kept():
    board, news = fold(Board(), SIGNAL, ORIGIN, alert_id="1", now=5.0)

    assert news is not None
    assert (news.id, news.host, news.detector, news.code) == ("1", "h1", "d", "a.b")
    assert (news.state, news.count, news.job, news.at) == (State.RAISED, 1, "j", 5.0)
    assert news.strategy is Strategy.ACT
    assert board.alerts == (news,)


def test_a_storm_told_in_one_signal_counts_all_of_it():
    storm = structs.replace(SIGNAL, count=800_000)
    board, news = fold(Board(), SIGNAL, ORIGIN, alert_id="1", now=5.0)
    board, more = fold(board, storm, ORIGIN, alert_id="2", now=6.0)

    assert (news.count, more) == (1, None)
    assert [a.count for a in board.alerts] == [800_001]


def test_a_repetition_only_counts():
    board, _ = fold(Board(), SIGNAL, ORIGIN, alert_id="1", now=5.0)
    board, news = fold(board, SIGNAL, ORIGIN, alert_id="2", now=6.0)

    assert news is None
    assert [(a.id, a.count) for a in board.alerts] == [("1", 2)]


def test_a_worse_repetition_is_news_under_the_same_id():
    board, _ = fold(Board(), SIGNAL, ORIGIN, alert_id="1", now=5.0)
    worse = structs.replace(SIGNAL, severity=Severity.FATAL)
    board, news = fold(board, worse, ORIGIN, alert_id="2", now=6.0)
    board, milder = fold(board, SIGNAL, ORIGIN, alert_id="3", now=7.0)

    assert news is not None
    assert (news.id, news.severity) == ("1", Severity.FATAL)
    assert milder is None
    assert board.alerts[0].severity is Severity.FATAL


def test_clearing_is_news_and_ends_the_finding():
    board, raised = fold(Board(), SIGNAL, ORIGIN, alert_id="1", now=5.0)
    cleared = structs.replace(SIGNAL, state=State.CLEARED, message="")
    board, news = fold(board, cleared, ORIGIN, alert_id="2", now=9.0)

    assert raised is not None
    assert news == structs.replace(raised, state=State.CLEARED, at=9.0)
    assert board.alerts == ()


def test_clearing_what_was_never_raised_is_nothing():
    cleared = structs.replace(SIGNAL, state=State.CLEARED)

    assert fold(Board(), cleared, ORIGIN, alert_id="1", now=0.0) == (Board(), None)


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
    """Whoever hears only the news knows what is raised; ids are unique per raise."""
    board, heard, ids = Board(), {}, []
    for number, (code, entity, severity, state) in enumerate(signals):
        signal = Signal(code=code, entity=entity, severity=severity, state=state)
        board, news = fold(board, signal, ORIGIN, alert_id=str(number), now=float(number))
        if news is None:
            continue
        key = (news.code, news.entity)
        if news.state is State.RAISED:
            ids += [] if key in heard else [news.id]
            heard[key] = news.severity
        else:
            del heard[key]

    assert {(a.code, a.entity): a.severity for a in board.alerts} == heard
    assert len(set(ids)) == len(ids)

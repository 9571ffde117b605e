"""Bounds on what one detector may have held, and on how fast it may change its mind."""

from __future__ import annotations

from msgspec import structs

from tmd.core.alerts.findings import Origin, Rules
from tmd.core.alerts.quota import BURST, EVIDENCE, LONGEST, MOST, PER_SECOND, TOO_MANY, Allowance
from tmd.core.alerts.triage import REMEMBERED, Board, declared_healthy, fold
from tmd.core.values.model import Severity, Signal, State, Strategy

ORIGIN = Origin("h1", "d", Strategy.ACT)
OTHER = Origin("h1", "other", Strategy.ACT)


def states(board: Board, *signals: Signal, origin: Origin = ORIGIN) -> Board:
    for number, signal in enumerate(signals):
        board, _ = fold(board, signal, origin, alert_id=str(number), now=0.0, clock=0.0)
    return board


def of(severity: Severity, count: int) -> list[Signal]:
    return [Signal("a.b", f"{severity} {number}", severity) for number in range(count)]


def ends(signals: list[Signal]) -> list[Signal]:
    return [structs.replace(each, state=State.CLEARED) for each in signals]


def codes(board: Board) -> list[str]:
    return [alert.code for alert in board.alerts]


def test_so_many_are_held_and_one_finding_says_that_there_are_more() -> None:
    """However many more: those that were first are kept, and the count is of those left out."""
    board = states(Board(), *of(Severity.WARNING, 3 * MOST))

    assert codes(board) == ["a.b"] * MOST + [TOO_MANY]
    assert [a.entity for a in board.alerts[:MOST]] == [s.entity for s in of(Severity.WARNING, MOST)]
    said = board.alerts[-1]
    assert (said.entity, said.severity, said.count) == ("detector:d", Severity.WARNING, 2 * MOST)
    assert said.strategy is Strategy.ADVISE
    assert f"a.b of warning {3 * MOST - 1}" in said.message


def test_what_is_graver_always_finds_room() -> None:
    """Warnings without number do not hide that a GPU is lost; nor does another detector."""
    board = states(Board(), *of(Severity.WARNING, 2 * MOST))
    board = states(board, *of(Severity.FATAL, 1))
    board = states(board, *of(Severity.WARNING, 1), origin=OTHER)

    assert [a.severity for a in board.alerts if a.severity is Severity.FATAL] == [Severity.FATAL]
    assert [a.detector for a in board.alerts].count("other") == 1


def test_those_that_wait_for_their_time_count_as_well() -> None:
    """A hold time must not be a way around."""
    patient = Origin("h1", "d", Strategy.ACT, Rules(hold_s=60))
    board = states(Board(), *of(Severity.WARNING, 2 * MOST), origin=patient)

    assert len(board.suspects) == MOST
    assert codes(board) == [TOO_MANY]


def test_it_is_over_when_the_detector_has_ended_all_that_was_held() -> None:
    """Before that nobody knows which of those left out still hold."""
    stated = of(Severity.WARNING, 2 * MOST)
    almost = states(Board(), *stated, *ends(stated[1:]))

    assert codes(almost) == ["a.b", TOO_MANY]
    assert states(almost, *ends(stated[:1])).alerts == ()


def test_texts_are_cut() -> None:
    """Of whatever is said, also of the lines of evidence and of how many there are."""
    long = "x" * 5 * LONGEST
    signal = Signal(long, long, Severity.INFO, message=long, job=long, evidence=(long,) * 99)
    (alert,) = states(Board(), signal).alerts

    texts = (alert.code, alert.entity, alert.message, alert.job, *alert.evidence)
    assert {len(text) for text in texts} == {LONGEST}
    assert len(alert.evidence) == EVIDENCE


def test_what_came_back_is_remembered_up_to_a_number() -> None:
    """A finding that flaps for days fills no disk, and what another detector raised stays."""
    flapping, quiet = (
        Origin("h1", name, Strategy.OBSERVE, Rules(repeats=10**6)) for name in ("d", "quiet")
    )
    up = of(Severity.WARNING, 1)
    board = states(Board(), *up, *ends(up), origin=quiet)
    board = states(board, *(up + ends(up)) * (REMEMBERED + 7), origin=flapping)

    assert [r.key.detector for r in board.memory.raises] == ["quiet"] + ["d"] * REMEMBERED


def test_an_operators_word_ends_what_was_left_out_as_well() -> None:
    """Nothing is held any more, so nothing is left out."""
    board = states(Board(), *of(Severity.WARNING, 2 * MOST))
    board, news = declared_healthy(board, "h1", "a.b", by="ann", request="r", now=0.0)

    assert board.alerts == ()
    assert [alert.code for alert in news].count(TOO_MANY) == 1


def test_after_a_burst_a_detector_ends_findings_at_a_rate() -> None:
    """And what it has not used comes back with time, up to the burst."""
    allowance = Allowance(BURST, PER_SECOND)
    for _ in range(BURST):
        allowance = allowance.spent(0.0)

    assert allowance.owed_s == 0.0
    assert allowance.spent(0.0).owed_s == 1 / PER_SECOND
    assert allowance.spent(1.0).used == BURST - PER_SECOND + 1
    assert allowance.spent(1e6).used == 1

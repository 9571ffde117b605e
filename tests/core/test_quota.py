"""Limits on a detector's open findings, and on the rate at which it ends them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import ValidationError, structs

from tmd.core.alerts.findings import FindingRules, Origin
from tmd.core.alerts.quota import BURST, EVIDENCE, LONGEST, MOST, PER_SECOND, TOO_MANY, Allowance
from tmd.core.alerts.triage import REMEMBERED, FindingsBoard, declared_healthy, fold
from tmd.core.values.model import Severity, Signal, State, Strategy
from tmd.core.values.requests import HealthyRequest

ORIGIN = Origin("h1", "d", Strategy.ACT)
OTHER = Origin("h1", "other", Strategy.ACT)


def states(board: FindingsBoard, *signals: Signal, origin: Origin = ORIGIN) -> FindingsBoard:
    for number, signal in enumerate(signals):
        board, _ = fold(board, signal, origin, alert_id=str(number), now=0.0, clock=0.0)
    return board


def of(severity: Severity, count: int) -> list[Signal]:
    return [Signal("a.b", f"{severity} {number}", severity) for number in range(count)]


def ends(signals: list[Signal]) -> list[Signal]:
    return [structs.replace(each, state=State.CLEARED) for each in signals]


def codes(board: FindingsBoard) -> list[str]:
    return [alert.code for alert in board.alerts]


def test_findings_above_the_limit_are_dropped_and_counted() -> None:
    """The first ones are kept, for any number of others, and the dropped ones are counted."""
    board = states(FindingsBoard(), *of(Severity.WARNING, 3 * MOST))

    assert codes(board) == ["a.b"] * MOST + [TOO_MANY]
    assert [a.entity for a in board.alerts[:MOST]] == [s.entity for s in of(Severity.WARNING, MOST)]
    said = board.alerts[-1]
    assert (said.entity, said.severity, said.count) == ("detector:d", Severity.WARNING, 2 * MOST)
    assert said.strategy is Strategy.ADVISE
    assert f"a.b of warning {3 * MOST - 1}" in said.message


def test_graver_findings_are_always_kept() -> None:
    """Any number of warnings never hides a lost GPU, nor do findings of another detector."""
    board = states(FindingsBoard(), *of(Severity.WARNING, 2 * MOST))
    board = states(board, *of(Severity.FATAL, 1))
    board = states(board, *of(Severity.WARNING, 1), origin=OTHER)

    assert [a.severity for a in board.alerts if a.severity is Severity.FATAL] == [Severity.FATAL]
    assert [a.detector for a in board.alerts].count("other") == 1


def test_suspects_count_towards_the_limit() -> None:
    """A hold time must not circumvent the limit."""
    patient = Origin("h1", "d", Strategy.ACT, FindingRules(hold_s=60))
    board = states(FindingsBoard(), *of(Severity.WARNING, 2 * MOST), origin=patient)

    assert len(board.suspects) == MOST
    assert codes(board) == [TOO_MANY]


def test_the_overflow_ends_with_all_other_findings() -> None:
    """Earlier it is unknown which of the dropped findings still hold."""
    stated = of(Severity.WARNING, 2 * MOST)
    almost = states(FindingsBoard(), *stated, *ends(stated[1:]))

    assert codes(almost) == ["a.b", TOO_MANY]
    assert states(almost, *ends(stated[:1])).alerts == ()


def test_texts_are_cut() -> None:
    """This holds for every text, including evidence lines and their number."""
    long = "x" * 5 * LONGEST
    signal = Signal(long, long, Severity.INFO, message=long, job=long, evidence=(long,) * 99)
    (alert,) = states(FindingsBoard(), signal).alerts

    texts = (alert.code, alert.entity, alert.message, alert.job, *alert.evidence)
    assert {len(text) for text in texts} == {LONGEST}
    assert len(alert.evidence) == EVIDENCE


def test_text_that_is_no_unicode_is_escaped() -> None:
    """A file name that is not UTF-8: no alert about it could be written anywhere."""
    board = states(
        FindingsBoard(), Signal("a.b", "file:\udcff", Severity.WARNING, evidence=("\udcff",))
    )

    (found,) = board.alerts
    assert (found.entity, found.evidence) == ("file:\\udcff", ("\\udcff",))


@pytest.mark.parametrize(
    "changes", [{"count": 2.0}, {"severity": "grave"}, {"evidence": (1,)}, {"message": None}]
)
def test_a_value_of_a_wrong_type_is_refused(changes: dict[str, Any]) -> None:
    """Stored, it would make the status of the whole host unreadable."""
    signal = Signal("a.b", "host", Severity.WARNING)
    for name, value in changes.items():
        structs.force_setattr(signal, name, value)

    with pytest.raises(ValidationError):
        states(FindingsBoard(), signal)


def test_remembered_raises_are_bounded() -> None:
    """A flapping finding fills no disk, and raises of another detector stay."""
    flapping, quiet = (
        Origin("h1", name, Strategy.OBSERVE, FindingRules(repeats=10**6)) for name in ("d", "quiet")
    )
    up = of(Severity.WARNING, 1)
    board = states(FindingsBoard(), *up, *ends(up), origin=quiet)
    board = states(board, *(up + ends(up)) * (REMEMBERED + 7), origin=flapping)

    assert [r.key.detector for r in board.memory.raises] == ["quiet"] + ["d"] * REMEMBERED


def test_a_declaration_of_health_ends_the_overflow_as_well() -> None:
    """No finding is left, so none is dropped any more."""
    board = states(FindingsBoard(), *of(Severity.WARNING, 2 * MOST))
    board, news = declared_healthy(board, HealthyRequest("h1", "r", "a.b", "ann"), now=0.0)

    assert board.alerts == ()
    assert [alert.code for alert in news].count(TOO_MANY) == 1


def test_after_a_burst_a_detector_ends_findings_at_a_rate() -> None:
    """Unused allowance comes back with time, up to the burst."""
    allowance = Allowance(BURST, PER_SECOND)
    for _ in range(BURST):
        allowance = allowance.spent(0.0)

    assert allowance.owed_s == 0.0
    assert allowance.spent(0.0).owed_s == 1 / PER_SECOND
    assert allowance.spent(1.0).used == BURST - PER_SECOND + 1
    assert allowance.spent(1e6).used == 1

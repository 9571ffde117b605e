"""The daemon's log: nobody fills it."""

from __future__ import annotations

import pytest
import structlog

from tmd.daemon.logs import BURST, KINDS, PER_SECOND, Rationing


def said(rationing: Rationing, event: str, **more: str) -> dict[str, object] | None:
    """The line, or ``None`` if it is left out."""
    try:
        return dict(rationing(None, "warning", {"event": event, **more}))
    except structlog.DropEvent:
        return None


def test_what_is_said_too_often_is_left_out_and_counted() -> None:
    """A stranger who knocks without end costs a bounded number of lines, and hides no others."""
    now = [0.0]
    rationing = Rationing(lambda: now[0])
    lines = [said(rationing, "client rejected") for _ in range(BURST + 1000)]

    assert sum(line is not None for line in lines) == BURST
    assert said(rationing, "leading") == {"event": "leading"}
    now[0] = 2.0
    later = [said(rationing, "client rejected") for _ in range(100)]
    assert later[0] == {"event": "client rejected", "left_out": 1000}
    assert sum(line is not None for line in later) == 2 * PER_SECOND


def test_an_alert_does_not_keep_another_out() -> None:
    """A finding that flaps has an allowance of its own."""
    rationing = Rationing(lambda: 0.0)
    for _ in range(BURST + 1):
        said(rationing, "alert", code="mine.flaps")

    assert said(rationing, "alert", code="mine.flaps") is None
    assert said(rationing, "alert", code="xid.79") is not None


@pytest.mark.parametrize("kinds", [KINDS, 10 * KINDS])
def test_kinds_without_number_share_one_allowance(kinds: int) -> None:
    """A plug-in that puts numbers into the text of its events is no way around, and those that were
    not lately in use make room."""
    now = [0.0]
    rationing = Rationing(lambda: now[0])
    lines = [said(rationing, f"event {number}") for number in range(kinds)]
    now[0] = 3600.0
    later = [said(rationing, f"later {number}") for number in range(KINDS)]

    assert sum(line is not None for line in lines) == min(kinds, KINDS + BURST)
    assert None not in later

"""The daemon's log: no client can fill it."""

from __future__ import annotations

import json

import pytest
import structlog

from tmd.config import Log
from tmd.daemon import logs
from tmd.daemon.logs import BURST, KINDS, PER_SECOND, RateLimit


def logged(rate_limit: RateLimit, event: str, **more: str) -> dict[str, object] | None:
    """The line, or ``None`` if it is dropped."""
    try:
        return dict(rate_limit(None, "warning", {"event": event, **more}))
    except structlog.DropEvent:
        return None


def test_what_is_said_too_often_is_left_out_and_counted() -> None:
    """Endless connections of a foreign client cost a bounded number of lines and hide no others."""
    now = [0.0]
    rate_limit = RateLimit(lambda: now[0])
    lines = [logged(rate_limit, "client rejected") for _ in range(BURST + 1000)]

    assert sum(line is not None for line in lines) == BURST
    assert logged(rate_limit, "leading") == {"event": "leading"}
    now[0] = 2.0
    later = [logged(rate_limit, "client rejected") for _ in range(100)]
    assert later[0] == {"event": "client rejected", "left_out": 1000}
    assert sum(line is not None for line in later) == 2 * PER_SECOND


def test_an_exception_in_a_group_is_logged_with_its_place(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """The daemon ends with the group of its tasks."""
    request.addfinalizer(structlog.reset_defaults)
    logs.configure(Log(format="json"))
    try:
        [][0]
    except IndexError as error:
        failure = error
    try:
        raise ExceptionGroup("tasks", [failure])
    except ExceptionGroup:
        structlog.get_logger().exception("the daemon failed")
    (group,) = json.loads("".join(capsys.readouterr()))["exception"]

    assert request.node.name in json.dumps(group["exceptions"])


def test_one_alert_does_not_suppress_another() -> None:
    """A flapping finding has its own allowance."""
    rate_limit = RateLimit(lambda: 0.0)
    for _ in range(BURST + 1):
        logged(rate_limit, "alert", code="mine.flaps")

    assert logged(rate_limit, "alert", code="mine.flaps") is None
    assert logged(rate_limit, "alert", code="xid.79") is not None


@pytest.mark.parametrize("kinds", [KINDS, 10 * KINDS])
def test_kinds_without_number_share_one_allowance(kinds: int) -> None:
    """A plug-in cannot evade the limit with numbers in its event texts; kinds that were not used
    lately make room."""
    now = [0.0]
    rate_limit = RateLimit(lambda: now[0])
    lines = [logged(rate_limit, f"event {number}") for number in range(kinds)]
    now[0] = 3600.0
    later = [logged(rate_limit, f"later {number}") for number in range(KINDS)]

    assert sum(line is not None for line in lines) == min(kinds, KINDS + BURST)
    assert None not in later

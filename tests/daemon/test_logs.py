"""The daemon's log: no client can fill it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from contextlib import suppress

import pytest
import structlog

from tmd.config import Log
from tmd.daemon import logs
from tmd.daemon.logs import BURST, FRAMES, KINDS, PER_SECOND, RateLimit


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


def test_every_line_names_the_host_also_from_another_thread(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """A long list says how much is missing."""
    request.addfinalizer(structlog.reset_defaults)
    logs.configure(Log(format="json"), host="h9")
    log = structlog.get_logger()
    thread = threading.Thread(
        target=log.warning, args=("x",), kwargs={"keys": [*range(FRAMES + 2)]}
    )
    thread.start()
    thread.join()
    line = json.loads("".join(capsys.readouterr()))

    assert (line["host"], line["keys"][-2:]) == ("h9", [FRAMES - 1, "... 2 more"])


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


def test_a_log_that_cannot_be_written_fails_nobody(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Nobody reads the log for a while. The next line that can be written counts those before."""
    request.addfinalizer(structlog.reset_defaults)
    reader, writer = os.pipe()
    room = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    with open(reader, "rb", buffering=0) as read, open(writer, "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        logs.configure(Log(format="json"))
        os.write(writer, b"." * (room - 1) + b"\n")
        structlog.get_logger().warning("of tmd")
        logging.getLogger("aiohttp.server").warning("of a library")
        logs.configure(Log(format="json", level="warning"))
        read.read(room)
        structlog.get_logger().warning("later")
        structlog.get_logger().warning("last")
        written = [json.loads(line) for line in read.read(room).splitlines()]

    assert (written[-2]["event"], written[-2].get("unwritten")) == ("later", 2)
    assert "unwritten" not in written[-1]


def test_a_log_whose_reader_has_gone_fails_nobody(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(structlog.reset_defaults)
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), open(writer, "w") as gone:
        monkeypatch.setattr("sys.stderr", gone)
        logs.configure(Log())
        structlog.get_logger().warning("nobody hears this")
    structlog.get_logger().warning("nor that")

    assert gone.closed

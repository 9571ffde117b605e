"""The operator's commands as checks: real processes."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from contextlib import aclosing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tmd_detectors.exec.detector import (
    CheckHealth,
    CheckOutcome,
    CheckRunner,
    ExecCheck,
    ExecConfig,
    ExecDetector,
    ExecFindings,
    judge,
)

from tmd.config import parse
from tmd.core.values.errors import ConfigError
from tmd.daemon.plugins import installed, load_detectors
from tmd.plugin import DETECTOR_GROUP, Severity, State
from tmd.testing import FakeContext

SAYS = b'{"message": "hot", "evidence": ["90 C"]}'


def check(*command, **changes):
    return ExecCheck(name="mine", command=command, **{"timeout_s": 30.0, **changes})


def shell(script, **changes):
    return check("/bin/sh", "-c", script, **changes)


# --- interpretation of a run ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "output", "health"),
    [
        (0, b"", CheckHealth.HEALTHY),
        (0, SAYS, CheckHealth.HEALTHY),
        (1, SAYS, CheckHealth.DEGRADED),
        (2, SAYS, CheckHealth.FAILED),
        (1, b"", CheckHealth.UNKNOWN),  # a crashed script
        (2, b"usage: ...", CheckHealth.UNKNOWN),
        (0, b"all is well", CheckHealth.UNKNOWN),
        (1, b'{"evidence": []}', CheckHealth.UNKNOWN),
        (3, SAYS, CheckHealth.UNKNOWN),
        (127, b"", CheckHealth.UNKNOWN),
        (-11, SAYS, CheckHealth.UNKNOWN),
    ],
)
def test_an_invalid_check_result_is_no_finding_about_the_host(status, output, health):
    assert judge(status, output).health is health


@given(st.integers(-64, 255), st.binary())
def test_no_output_breaks_the_judge(status, output):
    """Without a JSON message there is never a finding about the host."""
    outcome = judge(status, output)

    if outcome.health in (CheckHealth.DEGRADED, CheckHealth.FAILED):
        assert isinstance(msgspec.json.decode(output)["message"], str)


def test_findings_follow_the_health_of_the_host():
    """A finding keeps its gravest severity until the check passes."""
    findings = ExecFindings(check("x"))
    story = [
        CheckOutcome(CheckHealth.HEALTHY),
        CheckOutcome(CheckHealth.DEGRADED, "hot", ("90 C",)),
        CheckOutcome(CheckHealth.DEGRADED, "hot"),
        CheckOutcome(CheckHealth.FAILED, "melted"),
        CheckOutcome(CheckHealth.UNKNOWN, "late"),
        CheckOutcome(CheckHealth.UNKNOWN, "late"),
        CheckOutcome(CheckHealth.DEGRADED, "hot"),
        CheckOutcome(CheckHealth.HEALTHY),
    ]
    raised, cleared = State.RAISED, State.CLEARED

    found = [[(s.code, s.entity, s.severity, s.state) for s in findings.observe(o)] for o in story]

    degraded = ("exec.mine", "host", Severity.DEGRADED)
    fatal = ("exec.mine", "host", Severity.FATAL)
    unusable = ("exec.unusable", "check:mine", Severity.WARNING)
    assert found == [
        [],
        [(*degraded, raised)],
        [],
        [(*fatal, raised)],
        [(*unusable, raised)],
        [],
        [(*unusable, cleared)],
        [(*fatal, cleared)],
    ]


# --- real processes -------------------------------------------------------------------------------


async def test_the_result_of_a_real_command_is_read():
    outcome = await CheckRunner(
        shell("""echo '{"message": "hot", "evidence": ["90 C"]}'; exit 1"""), 1000
    ).run()

    assert outcome == CheckOutcome(CheckHealth.DEGRADED, "hot", ("90 C",))


async def test_commands_run_without_a_shell():
    outcome = await CheckRunner(check("/bin/echo", '{"message": "$HOME; exit 2"}'), 1000).run()

    assert outcome == CheckOutcome(CheckHealth.HEALTHY, "$HOME; exit 2")


async def test_a_missing_command_is_reported():
    outcome = await CheckRunner(check("/no/such/program"), 1000).run()

    assert outcome.health is CheckHealth.UNKNOWN
    assert "cannot be started" in outcome.message


async def test_secrets_of_the_daemon_stay_with_it(monkeypatch):
    monkeypatch.setenv("TMD_CLUSTER__SECRET", "hidden")
    outcome = await CheckRunner(
        shell('echo "{\\"message\\": \\"<$TMD_CLUSTER__SECRET>\\"}"'), 1000
    ).run()

    assert outcome.message == "<>"


async def test_too_much_output_ends_the_check():
    outcome = await CheckRunner(check("/usr/bin/env", "yes"), 1000).run()

    assert outcome == CheckOutcome(CheckHealth.UNKNOWN, "wrote more than 1000 bytes")


async def test_a_late_check_is_killed_with_all_it_started(tmp_path):
    """The grandchild holds a lock on a FIFO's writing end: EOF proves that it is gone."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        outcome = await CheckRunner(shell(f"sleep 1000 > {fifo} & wait", timeout_s=0.5), 1000).run()
        # A killed process is not gone at once: the kernel ends it in its own time.
        ended, _, _ = select.select([reader], [], [], 60)
        rest = os.read(reader, 1)
    finally:
        os.close(reader)

    assert outcome == CheckOutcome(CheckHealth.UNKNOWN, "ran for more than 0.5 s")
    assert ended
    assert rest == b""


async def test_a_check_that_cannot_be_ended_does_not_run_again_before_it_has(tmp_path):
    """Its warden waits for its processes. Here it is stopped, and so cannot end them either."""
    log = tmp_path / "log"
    script = f"printf + >> {log}; test $(wc -c < {log}) -gt 1 || kill -STOP $PPID"
    runner = CheckRunner(shell(script, timeout_s=1.0), 1000)
    first, second = await runner.run(), await runner.run()
    runs = log.read_text()
    warden = int(second.message.partition("--ppid ")[2].split()[0])
    ended = os.pidfd_open(warden)
    os.kill(warden, signal.SIGCONT)
    await asyncio.to_thread(select.select, [ended], [], [])
    os.close(ended)
    third = await runner.run()

    assert runs == "+"
    assert first == CheckOutcome(CheckHealth.UNKNOWN, "ran for more than 1 s")
    assert second.health is CheckHealth.UNKNOWN
    assert "is not run again, as a process of its last run cannot be killed" in second.message
    assert third.health is CheckHealth.HEALTHY


async def test_a_finding_says_that_a_late_check_is_not_run_again(tmp_path):
    """The first message says only that it was late."""
    hangs = shell("kill -STOP $PPID", timeout_s=0.1, every_s=0.01)
    async with aclosing(ExecDetector().watch(FakeContext(ExecConfig(checks=(hangs,))))) as signals:
        late, hung = await anext(signals), await anext(signals)
        os.kill(int(hung.message.partition("--ppid ")[2].split()[0]), signal.SIGCONT)

    assert "ran for more than 0.1 s" in late.message
    assert "is not run again" in hung.message
    assert (late.code, late.entity, late.state) == (hung.code, hung.entity, State.RAISED)


async def test_checks_run_concurrently_but_never_twice_at_once(tmp_path):
    """A hanging check does not delay another, whose log shows a start only after an end."""
    log = tmp_path / "log"
    failing = """{ echo '{"message": "five runs"}'; exit 1; }"""
    script = f"printf + >> {log}; printf - >> {log}; test $(wc -c < {log}) -lt 10 || {failing}"
    hangs = ExecCheck(name="hangs", command=("/bin/sleep", "1000"), timeout_s=1000)
    again = ExecCheck(name="again", command=("/bin/sh", "-c", script), every_s=0.001)
    async with aclosing(
        ExecDetector().watch(FakeContext(ExecConfig(checks=(hangs, again))))
    ) as signals:
        signal = await anext(signals)

    assert (signal.code, signal.message) == ("exec.again", "five runs")
    assert log.read_text().startswith("+-" * 5)


async def test_closing_the_detector_ends_its_commands(tmp_path):
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    script = f"exec 3> {fifo}; echo here >&3; exec sleep 1000"
    here = asyncio.Event()
    asyncio.get_running_loop().add_reader(reader, here.set)
    try:
        signals = ExecDetector().watch(
            FakeContext(ExecConfig(checks=(shell(script, timeout_s=1000),)))
        )
        waiting = asyncio.create_task(anext(signals))
        await here.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await signals.aclose()
        output = os.read(reader, 100), os.read(reader, 100)
    finally:
        asyncio.get_running_loop().remove_reader(reader)
        os.close(reader)

    assert output == (b"here\n", b"")


# --- configuration --------------------------------------------------------------------------------


def configured(**section):
    points = [p for p in installed(DETECTOR_GROUP) if p.name == "exec"]
    settings, _ = parse({"detectors": {"exec": section}})
    assert settings is not None
    return load_detectors(settings, points)[0].config


def test_checks_come_from_the_configuration():
    config = configured(checks=[{"name": "disk", "command": ["/bin/true"], "every_s": 5}])

    assert config.checks == (ExecCheck(name="disk", command=("/bin/true",), every_s=5.0),)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"name": "a", "command": []}, "length"),
        ({"name": "a", "command": "/bin/true"}, "array"),
        ({"name": "a b", "command": ["x"]}, "allowed are ASCII letters"),
        ({"name": "a", "command": ["x"], "every": 5}, "every"),
        ({"name": "a", "command": ["x"], "timeout_s": 0}, "> 0"),
        ({"command": ["x"]}, "name"),
    ],
)
def test_a_wrong_check_is_refused_at_start(wrong, reason):
    with pytest.raises(ConfigError, match=reason):
        configured(checks=[wrong])


def test_two_checks_of_one_name_are_refused():
    one = {"name": "a", "command": ["x"]}
    with pytest.raises(ConfigError, match="two checks are named a"):
        configured(checks=[one, one])

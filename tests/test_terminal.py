"""What hosts, kernels, scripts and configurations say is shown; no terminal obeys it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import tomllib

import pytest
import structlog
from msgspec import structs
from rich.markup import escape

from tests import values
from tests.test_cli import ENVIRONMENT, runner
from tmd.cli import output
from tmd.config import Log, load
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.checkpoints import MissedCheckpoint
from tmd.core.values.model import Activity, Exit, HostStatus, Rehearsal, Severity, Strategy
from tmd.core.values.printable import escaped, printable
from tmd.daemon import logs
from tmd.testing.clients import worker_status

HOSTILE = "a\x1b[2J\x1b]0;t\x07\x9b31m\u202e\u2066\u200b\u00ad[/][bold]x\x7f\r\nfaked line"
TOLD = printable(HOSTILE)
IN_TOML = json.dumps(HOSTILE.replace("\x7f", ""))


def output_of(*arguments, env=None):
    """Exit status, stdout and stderr of a verb; both without what a terminal would obey."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tmd.cli", *map(str, arguments)],
        capture_output=True,
        timeout=60,
        env={**ENVIRONMENT, "COLUMNS": "1000", **(env or {})},
    )
    out, error = done.stdout.decode(), done.stderr.decode()
    obeyed = [c for c in out + error if c != "\n" and escaped(c) != c]
    assert obeyed == []
    assert "\nfaked line" not in out + error
    assert "Traceback" not in error
    return done.returncode, out, error


@pytest.fixture
def config(redis_url, tmp_path):
    path = tmp_path / "tmd.toml"
    path.write_text(
        f"[cluster]\nname = 'c{os.urandom(4).hex()}'\nsecret = '0123456789abcdef'\n"
        f"[redis]\nurl = '{redis_url}'\n[host]\nname = 'h1'\nruntime_dir = '{tmp_path}'\n"
        f"state_dir = '{tmp_path}/state'\nadvertise = '127.0.0.1'\n"
    )
    return path


@pytest.fixture
def cluster(config):
    """Everything that somebody says in it is hostile."""
    store = runner(load(config))
    alert = values.alert(
        code=f"nic.{HOSTILE}",
        entity=HOSTILE,
        detector=HOSTILE,
        message=HOSTILE,
        severity=Severity.FATAL,
        strategy=Strategy.ACT,
    )
    first = structs.replace(
        worker_status("h1/job/0.a"),
        activity=Activity.TRAINING,
        detail=HOSTILE,
        rank=0,
        missed=MissedCheckpoint(3, HOSTILE, 1),
    )
    idle = worker_status(f"{HOSTILE}/job/1.a", activity=Activity.STANDBY)
    idle = structs.replace(idle, rehearsed=(Rehearsal(1, 0.5, refusal=HOSTILE),))
    before = values.record("h1", HOSTILE)
    plan = values.plan(before.membership, reason=HOSTILE, cause=HOSTILE)
    job = structs.replace(before, detail=HOSTILE, history=(plan,))

    async def fill(s):
        gone = Exit(f"{HOSTILE}/job/0.a", "job", 1, 1.0)
        h1 = HostStatus("h1", "i", workers=(first,), alerts=(alert,), at=time.time())
        other = HostStatus(HOSTILE, "i", workers=(idle,), exits=(gone,), at=time.time())
        for host in (h1, other):
            await s.put_host(host, ttl_s=60, wake=False)
        await s.put_job(job, expected=0)
        await s.acquire(f"{HOSTILE}#abc", ttl_s=60, floor=0)
        await s.publish_alert(alert)
        await s.set_breaker(Breaker(open=True, reason=HOSTILE, at=1.0))

    store(fill)
    return store


def test_status_shows_it_and_does_not_fail(config, cluster):
    status, out, _ = output_of("status", "-c", config)

    assert status == 0
    assert out.count(TOLD) >= 8


def test_status_json_keeps_it_intact(config, cluster):
    status, out, _ = output_of("status", "--json", "-c", config)

    assert status == 0
    assert HOSTILE in [h["host"] for h in json.loads(out)["hosts"]]


def test_events(config, cluster):
    """No hostile text reaches the terminal, and ``--json`` keeps it escaped."""
    status, out, _ = output_of("events", "-c", config)
    _, as_json, _ = output_of("events", "--json", "-c", config)

    assert status == 0
    assert out.count("\n") == 1
    assert TOLD in out
    assert json.loads(as_json)["message"] == HOSTILE


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        (("policy", "explain"), 0),
        (("policy", "explain", "--json"), 0),
        (("drain", "h1", "--dry-run"), 0),
        (("drain", "h1"), (0, 3)),
        (("drain", HOSTILE, "--wait", "--timeout", "0.2"), (1, 3)),
        (("drain", f"{HOSTILE}?"), 1),
        (("undrain", HOSTILE), 1),
        (("set-healthy", HOSTILE, "--code", HOSTILE), 0),
        (("standby", "rehearse", HOSTILE, "--timeout", "0.2"), 1),
        (("standby", "rehearse", HOSTILE, "--no-wait"), 0),
        (("resume",), 0),
        (("inject", HOSTILE), 1),
        (("inject", "a", "--gpu", HOSTILE), 2),
        (("detectors", "run", HOSTILE), 2),
        (("xid", "explain", HOSTILE), 2),
        (("policy", "explain", "--view", f"/nowhere/{HOSTILE}"), 1),
        (("launch", "--job", HOSTILE, "--nnodes", "1", "/bin/true"), 2),
        (("launch", "--job", "j", "--nnodes", "1", f"{HOSTILE}.py"), 2),
    ],
    ids=repr,
)
def test_verbs(config, cluster, verb, expected):
    """Each ends with its usual status and writes nothing that a terminal would obey."""
    status, out, error = output_of(*verb, env={"TMD_CONFIG": str(config)})

    assert status in (expected if isinstance(expected, tuple) else (expected,)), out + error


@pytest.mark.parametrize(
    ("section", "key"),
    [("cluster", "name"), ("host", "name"), ("host", "users"), ("detectors.exec", "checks")],
)
@pytest.mark.parametrize("verb", ["config check", "config show", "daemon", "doctor"])
def test_a_name_in_the_configuration_is_refused_by_its_key(tmp_path, section, key, verb):
    given = {
        "users": f"[{IN_TOML}]",
        "checks": f'[{{name = {IN_TOML}, command = ["x"]}}]',
    }.get(key, IN_TOML)
    path = tmp_path / "tmd.toml"
    more = "secret = '0123456789abcdef'\n" if section == "cluster" else ""
    path.write_text(f"[{section}]\n{key} = {given}\n{more}")
    env = {"TMD_CLUSTER__SECRET": "0123456789abcdef", "TMD_HOST__RUNTIME_DIR": str(tmp_path)}
    env["TMD_REDIS__URL"] = f"unix://{tmp_path}/gone"
    status, out, error = output_of(*verb.split(), "-c", path, env=env)

    if (verb, key) == ("doctor", "checks"):
        # It says all that it finds, and this is one of its findings.
        assert status == 1
        assert "FAIL  detectors" in out
        assert "[detectors.exec]" in out
        assert "\\x1b" in out
        return
    if (verb, key) == ("config show", "checks"):
        # Its own keys only a detector itself knows; here they are shown as what they are.
        assert tomllib.loads(out)["detectors"]["exec"]["checks"][0]["name"] == json.loads(IN_TOML)
        return
    assert status == 2
    assert "[detectors.exec]" in error if key == "checks" else f"[{section}] {key}: " in error
    assert "\\x1b" in error
    assert "allowed are" in error


@pytest.mark.parametrize(
    "text", [f"{IN_TOML} = 1\n", f"[{IN_TOML}]\na = 1\n", f"[log]\nlevel = {IN_TOML}"]
)
def test_an_error_of_the_configuration_is_harmless(tmp_path, text):
    path = tmp_path / "tmd.toml"
    path.write_text(text)

    assert output_of("config", "check", "-c", path)[0] == 2
    assert output_of("daemon", "-c", path)[0] == 2


def test_half_a_character_is_shown(tmp_path):
    """Of a path, as the system gives it."""
    status, _, error = output_of("config", "check", "-c", f"{tmp_path}/\udcff.toml")

    assert status == 2
    assert "\\udcff.toml" in error


def checked(config, tmp_path):
    """A configuration with a check that says hostile things."""
    answer = tmp_path / "answer"
    answer.write_text(json.dumps({"message": HOSTILE, "evidence": [HOSTILE]}))
    script = tmp_path / "check"
    script.write_text(f"#!/bin/sh\ncat {answer}\nexit 2\n")
    script.chmod(0o755)
    off = "".join(f"[detectors.{n}]\nenabled = false\n" for n in ("host", "nic", "nvml", "xid"))
    more = f'[detectors.exec]\nchecks = [{{name = "c", command = ["{script}"]}}]\n'
    with config.open("a") as file:
        file.write(off + more)
    return config


def test_scan(config, tmp_path):
    """What a check says is shown without what a terminal would obey."""
    path = checked(config, tmp_path)
    status, out, _ = output_of("scan", "--seconds", "3", "-c", path)
    _, as_json, _ = output_of("scan", "--seconds", "3", "--json", "-c", path)

    assert status == 2
    assert "[/][bold]x" in out
    assert HOSTILE.split("\r")[0] in json.loads(as_json)["alerts"][0]["message"]


def test_a_detector_in_the_foreground(config, tmp_path):
    command = [sys.executable, "-P", "-m", "tmd.cli", "detectors", "run", "exec"]
    with subprocess.Popen(
        [*command, "-c", str(checked(config, tmp_path))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as child:
        try:
            line = child.stdout.readline().decode()
            child.send_signal(signal.SIGINT)
            child.communicate(timeout=20)
        finally:
            child.kill()

    assert "[/][bold]x" in line
    assert [c for c in line if escaped(c) != c] == ["\n"]


def test_listings_survive_a_hostile_environment(config):
    for verb in (("plugins",), ("detectors", "list"), ("config", "show"), ("config", "check")):
        env = {"TMD_DETECTORS__NIC__ENABLED": "true", "TMD_HOST__ADVERTISE": HOSTILE}
        assert output_of(*verb, "-c", config, env=env)[0] == 0


def test_doctor(config):
    """A hostile address is a finding and not an instruction to the terminal."""
    assert output_of("doctor", "-c", config, env={"TMD_HOST__ADVERTISE": HOSTILE})[0] == 1


@pytest.mark.parametrize("form", ["console", "json"])
def test_the_log(form, capsys):
    """Also of an exception that somebody else has worded, in the daemon and the launcher."""
    logs.configure(Log(format=form))
    try:
        log = structlog.get_logger()
        log.info(f"x {HOSTILE}", text=HOSTILE, more=[HOSTILE])
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            log.exception("failed")
    finally:
        structlog.reset_defaults()
    text = capsys.readouterr().err

    assert "[/][bold]x" in text
    assert [c for c in text if c != "\n" and escaped(c) != c] == []


@pytest.mark.parametrize("err", [False, True])
def test_the_console_of_demo_and_campaign(capsys, err):
    """It reads markup, which is ours; nothing else in the text acts."""
    output.console(markup=True, stderr=err).print(f"[bold]{escape(HOSTILE)}[/]")
    printed = "".join(capsys.readouterr())

    assert "[/][bold]x" in printed.replace("\n", "")
    assert [c for c in printed if c != "\n" and escaped(c) != c] == []


# --- encodings, and an output that takes nothing --------------------------------------------------


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "cp1252"])
def test_json_is_json_in_every_encoding(encoding):
    """Characters that the terminal lacks are escaped as JSON escapes them."""
    raw = io.BytesIO()
    text = {"detail": "caf\xe9 \U0001f600 \x1b[31m \u202e"}
    with contextlib.redirect_stdout(io.TextIOWrapper(raw, encoding=encoding)):
        output.say_json(text)
        output.print_json(text)
        lines = raw.getvalue().decode(encoding)
    first, rest = lines.split("\n", 1)

    assert json.loads(first) == json.loads(rest) == text
    assert "\x1b" not in lines


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_table_is_shown_in_every_encoding(encoding):
    raw = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(raw, encoding=encoding)):
        output.draw(output.table(("what",), [("to be continued\u2026 \U0001f600",)]))
        sys.stdout.flush()
        shown = raw.getvalue().decode(encoding)

    assert "to be continued\\u2026 \\U0001f600" in shown


def test_an_output_that_takes_nothing_is_an_error_in_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tmd.cli", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )

    assert done.returncode == 1
    assert done.stderr == "tmd: the output cannot be written: No space left on device\n"


def test_an_argument_that_is_no_text_is_named(redis_url, tmp_path):
    config = tmp_path / "tmd.toml"
    config.write_text(f'[cluster]\nsecret = "{"s" * 32}"\n[redis]\nurl = "{redis_url}"\n')
    config.chmod(0o600)
    status, _, errors = output_of("undrain", os.fsdecode(b"\xff"), "-c", config)

    assert status == 2
    assert errors.startswith("tmd: an argument is not valid UTF-8: ")
    assert errors.count("\n") == 1

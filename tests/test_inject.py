"""``tmd inject`` beside a real daemon: what operators see, and what the cluster learns."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_cli import ENVIRONMENT, config, record, store, tmd  # noqa: F401 - fixtures
from tmd.core.values.model import State, Strategy

WITHIN_S = 20.0
GPU = "0000:3b:00.0"
ON = "[inject]\nenabled = true\n"
ACTING = "[detectors.xid]\nstrategy = 'act'\nsource = '/none'\n"


def until(condition, what):
    deadline = time.monotonic() + WITHIN_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


class Daemon:
    """A real one. ``more`` stands behind the configuration."""

    def __init__(self, config, store, more):  # noqa: F811
        self.config = config
        # A full disk of this machine is no finding of a test.
        self._base = config.read_text() + "[detectors.host]\ndisk_free_percent = 0\n"
        self._state = config.parent / "state"
        self._store = store
        self.log = config.parent / "log"
        self._process = None
        self.write(more)

    def write(self, more):
        self.config.write_text(self._base + more)

    def start(self):
        seen = len(self.alerts)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tmd.cli", "daemon", "-c", str(self.config)],
                stderr=log,
                stdout=log,
                env={**ENVIRONMENT, "TMD_HOST__STATE_DIR": str(self._state)},
            )
        until(lambda: (self.config.parent / "tmd.sock").exists(), "the daemon serves")
        until(lambda: self._store(lambda s: s.snapshot()).hosts, "its host has reported")
        return seen

    def reload(self):
        self._process.send_signal(signal.SIGHUP)
        until(lambda: "configuration reloaded" in self.log.read_text(), "it has reloaded")

    def kill(self):
        self._process.kill()
        self._process.wait(WITHIN_S)

    def stop(self):
        if self._process is not None:
            self._process.terminate()
            self._process.wait(WITHIN_S)

    @property
    def alerts(self):
        return [alert for _, alert in self._store(lambda s: s.alerts("", limit=100))]

    def received(self, number):
        return until(lambda: a if len(a := self.alerts) >= number else None, "it is published")


@pytest.fixture
def daemon(config, store):  # noqa: F811
    """A function that starts the daemon of host h1."""
    started = []

    def start(more):
        one = Daemon(config, store, more)
        started.append(one)
        one.start()
        return one

    yield start
    for one in started:
        one.stop()


def test_an_xid_is_injected_as_its_detector_would_say_it(daemon, config):  # noqa: F811
    """Fatal by the table, marked as injected, seen by status, on record in the daemon's log."""
    host = daemon(ON + ACTING)
    done = tmd("inject", "xid", 79, "--gpu", GPU, "-c", config)
    (alert,) = host.received(1)
    ended = tmd("inject", "--clear", "-c", config)
    over = host.received(2)[1]

    assert done.returncode == 0, done.stderr
    assert "injected on h1: fatal  xid.79  pci:0000:3b:00.0  INJECTED by" in done.stdout
    assert (alert.code, alert.entity, alert.strategy) == ("xid.79", f"pci:{GPU}", Strategy.ACT)
    assert (alert.detector, alert.severity.value) == ("injected:xid", "fatal")
    assert "dropped off the PCIe bus" in alert.message
    assert any("rehearsal" in line for line in alert.evidence)
    assert "cleared: fatal  xid.79" in ended.stdout
    assert (over.id, over.state) == (alert.id, State.CLEARED)
    written = host.log.read_text()
    assert "finding injected" in written
    assert "injected finding withdrawn" in written


def test_an_error_of_a_switch_is_injected_as_its_detector_would_say_it(daemon, config):  # noqa: F811
    host = daemon(ON + ACTING)
    done = tmd("inject", "sxid", 20034, "--switch", "05:00.0", "-c", config)
    (alert,) = host.received(1)
    ended = tmd("inject", "sxid", 20034, "--clear", "-c", config)

    assert done.returncode == 0, done.stderr
    assert (alert.code, alert.entity) == ("xid.sxid.20034", "nvswitch:0000:05:00.0")
    assert (alert.detector, alert.severity.value) == ("injected:xid", "fatal")
    assert "cleared: fatal  xid.sxid.20034" in ended.stdout


def test_for_programs_and_for_a_while(daemon, config):  # noqa: F811
    host = daemon(ON)
    arguments = ("--entity", "nic:eth0", "--severity", "degraded", "--message", "no carrier")
    done = tmd("inject", "nic.down", *arguments, "--for", "0.2", "--json", "-c", config)
    answer = json.loads(done.stdout)
    raised, over = host.received(2)

    assert (answer["alert"]["id"], answer["for_s"], answer["hold_s"]) == (raised.id, 0.2, 0.0)
    assert answer["alert"]["message"].endswith(": no carrier")
    assert (over.state, over.message) == (State.CLEARED, "injection: it has expired")


def test_a_dry_run_says_what_would_follow_and_raises_nothing(daemon, config):  # noqa: F811
    """Also with the switch off, and then it says so."""
    host = daemon(ACTING)
    done = tmd("inject", "xid", 79, "--gpu", GPU, "--dry-run", "-c", config)
    answer = json.loads(
        tmd("inject", "nic.down", "--severity", "fatal", "--dry-run", "--json", "-c", config).stdout
    )

    assert done.returncode == 0, done.stderr
    assert "would be raised: fatal  xid.79" in done.stdout
    assert "no policy requests anything" in done.stdout
    assert f"[inject] enabled = true in {config}" in done.stderr
    (withheld,) = answer["withheld"]
    assert withheld["why"] == "strategy of injected:nic is observe"
    assert host.alerts == []


def test_a_dry_run_names_the_ranks_that_would_leave(daemon, config, store):  # noqa: F811
    """As if the finding had settled, though it would be young."""
    leaving = "[policies]\nenabled = ['drain_degraded']\n[leader]\ncandidate = false\n"
    daemon(ON + ACTING + leaving)
    store(lambda s: s.put_job(record("h1", "h2"), expected=0))
    done = tmd("inject", "xid", 79, "--gpu", GPU, "--dry-run", "-c", config)

    assert done.returncode == 0, done.stderr
    assert f"drain_degraded: drain h1/job/0.a: h1: xid.79 of pci:{GPU}, fatal" in done.stdout
    assert "h2/job/0.a" not in done.stdout
    assert done.stderr == ""


def test_off_by_default_and_switched_on_and_off_by_a_reload(daemon, config):  # noqa: F811
    host = daemon("")
    refused = tmd("inject", "nic.down", "-c", config)
    host.write(ON)
    host.reload()
    done = tmd("inject", "nic.down", "-c", config)
    raised = host.received(1)
    host.write("")
    host.log.write_text("")
    host.reload()
    over = host.received(2)[1]

    assert refused.returncode == 1
    assert f"set [inject] enabled = true in {config}" in refused.stderr
    assert done.returncode == 0, done.stderr
    assert [a.code for a in raised] == ["nic.down"]
    assert over.message == "injection: injection was switched off"


def test_a_daemon_that_is_killed_ends_it_when_it_is_back(daemon, config):  # noqa: F811
    host = daemon(ON)
    tmd("inject", "nic.down", "--for", 0, "-c", config)
    (raised,) = host.received(1)
    host.kill()
    host.start()
    over = host.received(2)[1]

    assert (over.id, over.state) == (raised.id, State.CLEARED)
    assert over.message == "injection: the daemon was restarted"


def test_the_daemon_refuses_what_no_detector_of_its_host_finds(daemon, config):  # noqa: F811
    daemon(ON)
    unknown = tmd("inject", "nonsense.down", "-c", config)
    nothing = tmd("inject", "--clear", "-c", config)

    assert (unknown.returncode, nothing.returncode) == (1, 1)
    assert "no detector here reports 'nonsense.down'" in unknown.stderr
    assert "nic" in unknown.stderr
    assert "no matching finding is injected on h1" in nothing.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("nic.down",), 1, "no daemon answers at"),
        (("nic.down", "--clear"), 1, "is tmd running on this host"),
        ((), 2, "the CODE is missing"),
        (("xid",), 2, "the XID or its GPU is missing"),
        (("xid", 79), 2, "--gpu 0000:3b:00.0"),
        (("xid", 79, "--gpu", "cuda:0"), 2, "'cuda:0' is not a PCI address"),
        (("xid", 999, "--gpu", GPU), 2, "XID 999 is not in the table"),
        (("xid", 79, "--gpu", GPU, "--entity", "host"), 2, "give one of them"),
        (("nic.down", 79), 2, "only 'xid' and 'sxid' take a number"),
        (("sxid",), 2, "the SXid or its NVSwitch is missing"),
        (("sxid", 20034), 2, "--switch 0000:05:00.0"),
        (("sxid", 20034, "--gpu", GPU), 2, "the SXid or its NVSwitch is missing"),
        (("sxid", 99999, "--switch", GPU), 2, "SXid 99999 is not in the table"),
        (("sxid", 10005, "--switch", GPU), 2, "SXid 10005 only clears"),
        (("sxid", 20034, "--switch", GPU, "--gpu", GPU), 2, "give one of them"),
        (("nic.down", "--severity", "awful"), 2, "'awful' is not one of"),
        (("nic.down", "--for", "-1"), 2, "'--for'"),
    ],
)
def test_mistakes_are_a_sentence_and_a_status(config, arguments, code, sentence):  # noqa: F811
    done = tmd("inject", *arguments, "-c", config)

    assert done.returncode == code
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_of_clear_is_refused_and_clears_nothing(config):  # noqa: F811
    done = tmd("inject", "--clear", "--dry-run", "-c", config)

    assert done.returncode == 2
    assert "--clear takes only a CODE and an entity" in done.stderr


def test_the_shell_completes_how_codes_begin():
    typed = {"_TMD_COMPLETE": "complete_bash", "COMP_WORDS": "tmd inject n", "COMP_CWORD": "2"}
    program = Path(sys.executable).with_name("tmd")
    done = subprocess.run(
        [program], env={**ENVIRONMENT, **typed}, capture_output=True, text=True, timeout=30
    )

    assert done.stdout.split() == ["nic.", "nvml."]

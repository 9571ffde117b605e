"""Notifications to systemd, and the shipped unit file."""

from __future__ import annotations

import configparser
import contextlib
import os
import resource
import shutil
import socket
import subprocess
import time
import tomllib
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from tmd.config import Host, load
from tmd.daemon.agent_socket import STRANGERS
from tmd.daemon.plugins import installed
from tmd.daemon.systemd import Notifier
from tmd.plugin import POLICY_GROUP

FOLDER = Path(__file__).parents[2] / "systemd"


def listening(path):
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(path)
    receiver.settimeout(2)
    return receiver


def test_systemd_gets_each_notification_and_children_cannot_send_any(tmp_path, monkeypatch):
    with listening(str(tmp_path / "n")) as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        monkeypatch.setenv("WATCHDOG_USEC", "30000000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        with closing(Notifier()) as notifier:
            notifier.ready("serving")
            notifier.alive()
            notifier.stopping()
        heard = [systemd.recv(100) for _ in range(3)]

    assert heard == [b"READY=1\nSTATUS=serving", b"WATCHDOG=1", b"STOPPING=1"]
    assert notifier.watchdog_s == 30
    assert "NOTIFY_SOCKET" not in os.environ


def test_systemd_is_notified_of_the_start_of_a_reload(tmp_path, monkeypatch):
    """In microseconds of the monotonic clock, as sd_notify(3) requires."""
    with listening(str(tmp_path / "n")) as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        before = time.monotonic() * 1e6
        with closing(Notifier()) as notifier:
            notifier.reloading()
        word, began = systemd.recv(100).split(b"\n")

    assert word == b"RELOADING=1"
    assert before - 1 <= int(began.removeprefix(b"MONOTONIC_USEC=")) <= time.monotonic() * 1e6


@contextmanager
def no_descriptor_left():
    """This process can open nothing meanwhile."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        for number in held:
            os.close(number)


def test_a_daemon_without_descriptors_still_notifies(tmp_path, monkeypatch):
    """Its watchdog would end it, and the connections that took them would outlive it."""
    with listening(str(tmp_path / "n")) as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        with closing(Notifier()) as notifier, no_descriptor_left():
            notifier.alive()
        heard = systemd.recv(100)

    assert heard == b"WATCHDOG=1"


def test_systemd_may_be_away(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
    with closing(Notifier()) as notifier:
        notifier.alive()
        with listening(str(tmp_path / "n")) as systemd:
            notifier.ready("serving")
            heard = systemd.recv(100)

    assert heard == b"READY=1\nSTATUS=serving"


def test_abstract_sockets_work(monkeypatch):
    name = f"tmd-test-{os.getpid()}"
    with listening(f"\0{name}") as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        with closing(Notifier()) as notifier:
            notifier.status("x")

        assert systemd.recv(100) == b"STATUS=x"


def test_without_systemd_notifications_do_nothing(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notifier = Notifier()
    notifier.ready("x")

    assert notifier.watchdog_s is None


def unit(section):
    """One section of the unit file, with its keys as written."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(FOLDER / "tmd.service")
    return parser[section]


def test_the_unit_gives_the_daemon_its_folders_and_time_to_stop():
    service = unit("Service")

    assert service["Type"] == "notify"
    assert float(service["TimeoutStopSec"]) > 2 * load(None).redis.timeout_s
    assert float(service["WatchdogSec"]) > 10
    assert int(service["LimitNOFILE"]) > 100 * STRANGERS
    assert (service["RuntimeDirectory"], service["StateDirectory"]) == ("tmd", "tmd")
    assert service["ExecReload"].endswith("kill -HUP $MAINPID")
    scripts = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["scripts"]
    assert service["ExecStart"].split()[1] in scripts
    assert "PrivateDevices" not in service


HARDENED = {
    "DynamicUser": "yes",
    "LockPersonality": "yes",
    "NoNewPrivileges": "yes",
    "PrivateTmp": "yes",
    "ProtectControlGroups": "yes",
    "ProtectHome": "yes",
    "ProtectHostname": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectSystem": "strict",
    "RestrictNamespaces": "yes",
    "RestrictRealtime": "yes",
    "RestrictSUIDSGID": "yes",
    "SystemCallArchitectures": "native",
    "UMask": "0077",
}
NEEDED_OPEN = ("PrivateDevices", "ProtectKernelLogs", "ProtectClock", "PrivateNetwork")
"""What the detectors read: GPUs, /dev/kmsg, the state of the clock, ports."""
EXPOSURE = 55
"""Tenths, of 100. systemd 252 reports 50; other versions weigh and know other keys."""


def test_the_unit_grants_only_what_the_daemon_reads():
    service = unit("Service")

    assert {key: service.get(key) for key in HARDENED} == HARDENED
    assert [key for key in NEEDED_OPEN if service.get(key, "no") != "no"] == []
    assert "@system-service" in service["SystemCallFilter"]
    assert {"AF_UNIX", "AF_INET"} <= set(service["RestrictAddressFamilies"].split())


def test_the_unit_starts_at_boot_and_restarts_forever():
    assert unit("Install")["WantedBy"] == "multi-user.target"
    assert unit("Unit")["StartLimitIntervalSec"] == "0"
    assert unit("Service")["Restart"] == "on-failure"
    assert unit("Service")["NotifyAccess"] == "main"


@pytest.fixture
def analyze():
    """A function that runs systemd-analyze on the unit. CI may lack it, too."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze in PATH: install systemd")
    known = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=30).stdout

    def run(*arguments):
        for option in (a.partition("=")[0] for a in arguments if a.startswith("--")):
            if option not in known:
                pytest.skip(f"this systemd-analyze knows no {option}")
        return subprocess.run(
            [program, *arguments, "--no-pager", FOLDER / "tmd.service"],
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_systemd_understands_every_line_of_the_unit(analyze):
    """The manual page is not installed here."""
    done = analyze("verify", "--man=no")

    assert done.returncode == 0, done.stderr
    assert "tmd.service:" not in done.stderr


def test_systemd_analyze_finds_the_unit_hardened_enough(analyze):
    done = analyze("security", "--offline=yes", f"--threshold={EXPOSURE}")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Overall exposure level for tmd.service" in done.stdout


def test_the_shipped_configuration_is_valid_and_shows_the_defaults(monkeypatch):
    for name in [n for n in os.environ if n.startswith("TMD_")]:
        monkeypatch.delenv(name)
    shipped, plain = load(FOLDER / "tmd.toml"), load(Path("/dev/null"))

    assert shipped.leader == plain.leader
    assert shipped.limits == plain.limits
    assert shipped.policies.enabled == plain.policies.enabled
    assert shipped.triage == plain.triage
    assert shipped.breaker == plain.breaker
    assert shipped.inject == plain.inject
    for point in installed(POLICY_GROUP):
        policy = point.load()
        own = msgspec.convert(shipped.policies.own.get(point.name, {}), policy.Config)
        assert own == policy.Config()
    assert shipped.detector("trainer").strategy == plain.detector("trainer").strategy


def test_systemds_folders_are_used(monkeypatch):
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/x")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/x:/other")
    host = Host()

    assert (str(host.socket), str(host.state_dir)) == ("/run/x/tmd.sock", "/var/lib/x")

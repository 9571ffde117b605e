"""The verbs that watch this host without a cluster, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys

import msgspec
import pynvml
import pytest
from tmd_detectors.xid.memory import XidMemory

from tests.distribution import distribution
from tests.test_cli import ENVIRONMENT, tmd
from tests.values import alert
from tmd.cli.doctor import driver_version, examine
from tmd.cli.observing import DEGRADED, FAILED, HEALTHY, health
from tmd.config import load, store_key
from tmd.core.values.model import HostStatus, Severity, Signal
from tmd.daemon.store import RedisStore
from tmd.plugin import boot_id

ONLY_EXEC = "[plugins]\nallow = ['exec']\n"


@pytest.fixture
def config(tmp_path):
    """A function that writes a configuration without Redis, with one check of a given script."""

    def write(script=None, more=""):
        path = tmp_path / "tmd.toml"
        text = f"[host]\nname = 'h1'\nruntime_dir = '{tmp_path}'\nstate_dir = '{tmp_path}'\n{more}"
        if script is not None:
            text += "[[detectors.exec.checks]]\nname = 'mine'\nevery_s = 0.05\n"
            text += f"command = ['{script}']\n"
        path.write_text(text)
        return path

    return write


def says(status):
    return f"""echo '{{"message": "look here"}}'; exit {status}"""


def script(tmp_path, status):
    """A check as a file: no quotes to quote."""
    path = tmp_path / "check"
    path.write_text(f"#!/bin/sh\n{says(status)}\n")
    path.chmod(0o755)
    return str(path)


# --- scan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "severity"), [(0, None), (1, "degraded"), (2, "fatal")])
def test_scan_tells_by_its_status(config, tmp_path, status, severity):
    """No Redis is configured; the findings of a check decide."""
    path = config(script(tmp_path, status), ONLY_EXEC)
    done = tmd("scan", "--json", "--seconds", "3", "-c", path)
    answer = json.loads(done.stdout)

    assert done.returncode == status, done.stderr
    assert [a["severity"] for a in answer["alerts"]] == ([severity] if severity else [])
    assert answer["watched"] == ["exec"]


def test_a_scan_whose_check_does_not_end_knows_nothing_of_the_host(config, tmp_path):
    """It would look healthy. Of another check that has failed it knows enough."""
    hangs = '[[detectors.exec.checks]]\nname = "hangs"\ncommand = ["/bin/sh", "-c", "sleep 60"]\n'
    path = config(script(tmp_path, 0), hangs + ONLY_EXEC)
    done = tmd("scan", "--json", "--seconds", "2", "-c", path)
    people = tmd("scan", "--seconds", "1", "-c", path)
    fails = config(script(tmp_path, 2), hangs + ONLY_EXEC)

    assert done.returncode == people.returncode == 3
    assert json.loads(done.stdout)["without_result"] == ["exec"]
    assert "exec has no result after 1 s, so the state of the host is unknown" in people.stderr
    assert tmd("scan", "--seconds", "3", "-c", fails).returncode == 2


def test_scan_for_people(config, tmp_path):
    """Findings are listed, and the exit status says that there are some."""
    path = config(script(tmp_path, 2), ONLY_EXEC)
    done = tmd("scan", "--seconds", "3", "-c", path)

    assert done.returncode == 2
    assert "exec.mine" in done.stdout
    assert "look here" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_scan_that_is_cut_short_says_nothing_about_the_host(config, tmp_path, number):
    """Not that it is healthy: its check has not ended."""
    began = tmp_path / "began"
    os.mkfifo(began)
    check = f'name = "slow"\ncommand = ["/bin/sh", "-c", "echo > {began}; sleep 60"]\n'
    path = config(more=f"[[detectors.exec.checks]]\n{check}")
    command = [sys.executable, "-m", "tmd.cli", "scan", "--seconds", "60", "-c", str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as child:
        try:
            began.read_text()  # waits for the check
            os.kill(child.pid, number)
            found, errors = child.communicate(timeout=20)
        finally:
            child.kill()

    assert (child.returncode, found) == (128 + number, "")
    assert f"{number.name} ended the scan before" in errors


def test_every_detector_takes_part_in_a_scan(config):
    answer = json.loads(tmd("scan", "--json", "--seconds", "4", "-c", config()).stdout)

    assert {"exec", "host", "nic", "trainer"} <= {*answer["watched"], *answer["unused"]}
    assert answer["without_result"] == []


@pytest.mark.parametrize(
    ("severities", "status"),
    [
        ((), HEALTHY),
        ((Severity.INFO,), HEALTHY),
        ((Severity.INFO, Severity.WARNING), DEGRADED),
        ((Severity.DEGRADED,), DEGRADED),
        ((Severity.DEGRADED, Severity.FATAL), FAILED),
    ],
)
def test_the_worst_finding_decides(severities, status):
    alerts = tuple(alert(severity=s) for s in severities)

    assert health(alerts) == status


# --- detectors ------------------------------------------------------------------------------------


def test_detectors_list_names_each_with_its_keys(config):
    rows = json.loads(tmd("detectors", "list", "--json", "-c", config()).stdout)
    found = {row["name"]: row for row in rows}

    assert found["exec"]["keys"] == ["checks", "output_limit"]
    assert found["nic"]["use"] == "observe"
    assert "poll_s" in tmd("detectors", "list", "-c", config()).stdout


def running(path, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "tmd.cli", "detectors", "run", "exec", "-c", str(path), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_detectors_run_prints_signals_until_it_is_told_to_end(config, tmp_path, number):
    with running(config(script(tmp_path, 1)), "--json") as child:
        try:
            line = json.loads(child.stdout.readline())
            os.kill(child.pid, number)
            rest, errors = child.communicate(timeout=20)
        finally:
            child.kill()

    assert (line["detector"], line["code"], line["state"]) == ("exec", "exec.mine", "raised")
    assert (child.returncode, rest) == (0, "")
    assert "Traceback" not in errors


def test_a_reader_that_goes_away_is_no_failure_of_the_detector(config, tmp_path):
    """As with ``| head -1``."""
    check = tmp_path / "flickering"
    check.write_text(f"#!/bin/sh\n{says('$(($(date +%N | cut -c 3) % 2))')}\n")
    check.chmod(0o755)
    with running(config(str(check))) as child:
        try:
            child.stdout.readline()
            child.stdout.close()
            status = child.wait(timeout=30)
            errors = child.stderr.read()
        finally:
            child.kill()

    assert status == 1
    assert "detector failed" not in errors
    assert "Traceback" not in errors


def test_detectors_run_for_people(config, tmp_path):
    with running(config(script(tmp_path, 1))) as child:
        try:
            line = child.stdout.readline()
        finally:
            child.terminate()

    assert line.split() == ["exec", "raised", "degraded", "exec.mine", "host", "look", "here"]


def test_running_a_detector_that_is_not_there_is_an_error(config):
    done = tmd("detectors", "run", "nix", "-c", config())

    assert done.returncode == 2
    assert "no detector 'nix'" in done.stderr
    assert "nic" in done.stderr


UNSURE = """
from tmd.plugin import Detector, DetectorConfig

class Unsure(Detector):
    name = "unsure"
    Config = DetectorConfig

    def supported(self):
        raise OSError("the tool is broken")

    async def watch(self, ctx):
        yield
"""


def test_a_detector_that_cannot_say_whether_it_works_is_a_finding_of_the_scan(config, tmp_path):
    distribution(tmp_path, "unsure", "tmd.detectors", UNSURE)
    path = config(more="[plugins]\nallow = ['unsure']\n")
    env = {"PYTHONPATH": str(tmp_path)}
    done = tmd("scan", "--json", "--seconds", "3", "-c", path, env=env)

    assert done.returncode == 1, done.stderr
    assert [a["code"] for a in json.loads(done.stdout)["alerts"]] == ["detector.failed"]


# --- doctor ---------------------------------------------------------------------------------------


def points(done):
    return {p["name"]: p for p in json.loads(done.stdout)}


def test_doctor_names_what_is_missing_and_what_to_do(config):
    done = tmd("doctor", "--json", "-c", config())
    found = points(done)

    assert done.returncode == 1
    assert not found["secret"]["ok"]
    assert "openssl rand" in found["secret"]["text"]
    assert "TMD_REDIS__URL" in found["redis"]["text"]
    assert found["socket folder"]["ok"]
    assert found["detector nic"]["ok"]


def test_doctor_is_content_with_a_host_that_has_all(config, redis_url):
    more = f"[cluster]\nsecret = '0123456789abcdef'\n[redis]\nurl = '{redis_url}'\n"
    done = tmd("doctor", "--json", "-c", config(more=more))
    found = points(done)

    assert done.returncode == 0, done.stdout
    assert found["redis"]["ok"]
    assert found["clock"]["ok"]
    assert "ok" in tmd("doctor", "-c", config(more=more)).stdout


def test_doctor_says_what_would_carry_collectives_on_which_machine(config):
    """Also where a variable decides it, and what the machine has plays no part."""
    env = ENVIRONMENT | {"TMD_CUDA": "staged"}
    found = points(tmd("doctor", "--json", "-c", config(), env=env))["collectives"]

    assert found["text"].startswith("own: TMD_CUDA=staged; ")
    assert all(each in found["text"] for each in ("GPU", "driver", "NCCL"))


@pytest.mark.parametrize("driven", [True, False])
def test_doctor_asks_nvml_for_the_version_of_the_driver(monkeypatch, driven):
    """Without a driver there is none, and no error."""

    def start():
        if not driven:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", start)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.65.06")
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)

    assert driver_version() == ("580.65.06" if driven else "")


def test_doctor_reports_the_rest_beside_a_broken_detector(config, tmp_path):
    bundle = tmp_path / "bundle.tar.gz"
    done = tmd("doctor", "--bundle", bundle, "-c", config(more="[detectors.typo]\nkey = 1\n"))

    assert done.returncode == 1
    assert "FAIL  detectors             [detectors.typo]" in done.stdout
    assert "state folder" in done.stdout
    assert bundle.exists()


def test_doctor_finds_a_redis_that_is_away(config, tmp_path):
    more = f"[cluster]\nsecret = '0123456789abcdef'\n[redis]\nurl = 'unix://{tmp_path}/gone'\n"
    done = tmd("doctor", "--json", "-c", config(more=more))

    assert done.returncode == 1
    assert "start Redis" in points(done)["redis"]["text"]


def test_doctor_finds_a_secret_that_is_not_that_of_the_cluster(config, redis_url):
    """Two hosts of one cluster, the second with a mistyped secret."""
    asyncio.run(_reported(redis_url, b"0123456789abcdef", host="h2"))
    text = "[cluster]\nname = 'doctor'\nsecret = '{}'\n[redis]\nurl = '{}'\n"
    asyncio.run(_reported(redis_url, b"0123456789abcdeX", host="h1"))  # by its own daemon
    typo = tmd("doctor", "--json", "-c", config(more=text.format("0123456789abcdeX", redis_url)))
    asyncio.run(_reported(redis_url, b"0123456789abcdef", host="h1"))
    same = tmd("doctor", "--json", "-c", config(more=text.format("0123456789abcdef", redis_url)))

    assert typo.returncode == 1
    assert "HostStatus" in points(typo)["shared secret"]["text"]
    assert "[cluster] secret_file" in points(typo)["shared secret"]["text"]
    assert points(same)["shared secret"]["ok"], same.stdout


def test_doctor_names_values_of_another_secret_on_a_host_whose_own_is_right(config, redis_url):
    """The daemon works here: it is another host's secret that is wrong."""
    asyncio.run(_reported(redis_url, b"0123456789abcdef", host="h3"))
    asyncio.run(_reported(redis_url, b"0123456789abcdeX", host="h2"))
    text = "[cluster]\nname = 'doctor'\nsecret = '0123456789abcdef'\n[redis]\nurl = '{}'\n"
    done = tmd("doctor", "--json", "-c", config(more=text.format(redis_url)))
    found = points(done)["shared secret"]

    assert done.returncode == 0
    assert not found["ok"]
    assert "only some values in Redis" in found["text"]


async def _reported(url, secret, host):
    store = RedisStore(url, "doctor", store_key(secret, "doctor"))
    await store.put_host(HostStatus(host=host, incarnation="1", at=0.0), ttl_s=60, wake=False)
    await store.close()


def test_doctor_finds_an_address_of_another_host(config):
    """192.0.2.1 is for documentation: nobody has it."""
    env = {"TMD_HOST__ADVERTISE": "192.0.2.1"}
    found = points(tmd("doctor", "--json", "-c", config(), env=env))

    assert not found["ports"]["ok"]
    assert "[host] advertise" in found["ports"]["text"]


def test_doctor_says_for_whom_it_asks_beside_a_daemon_of_another_user(config, monkeypatch):
    """Root may read the kernel log, say, and the daemon may not."""
    daemon = os.geteuid()
    settings = load(config())
    monkeypatch.setattr(os, "geteuid", lambda: daemon + 1)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(settings.host.socket))
        door.listen()
        found = {each.name: each for each in examine(settings)}

    assert found["state folder"].text.endswith(f"in use by the running daemon, of user {daemon}")
    asked = f"checked as user {daemon + 1}, and the daemon runs as user {daemon}"
    assert found["detector nic"].text.endswith(asked)


def test_doctor_finds_a_folder_that_cannot_be_used(config, tmp_path):
    (tmp_path / "file").touch()
    env = {"TMD_HOST__STATE_DIR": str(tmp_path / "file/state")}
    found = points(tmd("doctor", "--json", "-c", config(), env=env))

    assert not found["state folder"]["ok"]
    assert "file is not a folder" in found["state folder"]["text"]


def test_a_scan_leaves_the_memory_of_the_daemons_detectors_alone(config, tmp_path):
    """It reads it: a fault that stands is a finding of the scan, too."""
    log = tmp_path / "kmsg"
    log.touch()
    folder = tmp_path / "detectors" / "xid"
    folder.mkdir(parents=True)
    stands = Signal("xid.79", "pci:0000:03:00.0", Severity.FATAL, message="gone")
    kept = msgspec.json.encode(XidMemory(boot_id(), standing=(stands,)))
    (folder / "xid.json").write_bytes(kept)
    more = f"[plugins]\nallow = ['xid']\n[detectors.xid]\nsource = '{log}'\n"
    done = tmd("scan", "--json", "--seconds", "2", "-c", config(more=more))

    assert "xid.79" in {a["code"] for a in json.loads(done.stdout)["alerts"]}
    assert [(f.name, f.read_bytes()) for f in folder.iterdir()] == [("xid.json", kept)]

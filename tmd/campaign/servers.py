"""The Redis of a campaign: a server that can be killed and restarted, or a pair with a Sentinel."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

from tmd import embedded, lifeline
from tmd.core.values.errors import ConfigError, TmdError

START_S = 10.0
SERVICE = "tmd"
SENTINEL = """\
port {port}
dir {folder}
sentinel monitor {service} 127.0.0.1 {master} 1
sentinel down-after-milliseconds {service} 1000
sentinel failover-timeout {service} 5000
"""


class Private:
    """A private server that loses its data when it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._server: embedded.EmbeddedRedis | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.proceed()
        self._stack.close()

    @property
    def address(self) -> Path | str:
        """Its address: a Unix socket, or ``<host>:<port>`` if it runs in this process."""
        kind, _, place = self.url.partition("://")
        return Path(place) if kind == "unix" else place

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    def tell(self, command: str) -> str:
        """Send one command in Redis' inline form; returns the immediate answer."""
        return _ask(self.address, command)

    @property
    def pid(self) -> int:
        """Its process id.

        Raises:
            TmdError: it runs in this process.
        """
        if self._server is None or self._server.pid is None:
            raise TmdError("Redis runs in this process and cannot be struck")
        return self._server.pid

    def start(self) -> None:
        """Start it, empty."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._server = self._stack.enter_context(embedded.redis(self._folder))

    def stop(self) -> None:
        """Kill -9; all its data are lost."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._stack.close()

    def proceed(self) -> None:
        """Continue the process, whatever has stopped it."""
        if self._server is not None and self._server.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server.pid, signal.SIGCONT)


SERVERS = ("first", "second")


class WithSentinel:
    """A master, a replica, and one Sentinel that watches them, on ports of the loopback."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._ports = dict(zip((*SERVERS, "sentinel"), _free_ports(3), strict=True))
        first = self._ports["first"]
        self._serve("first")
        self._serve("second", replica_of=first)
        config = self._folder / "sentinel.conf"
        config.write_text(
            SENTINEL.format(
                port=self._ports["sentinel"], folder=self._folder, service=SERVICE, master=first
            )
        )
        self._start("sentinel", server_binary(), str(config), "--sentinel")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self._ports['sentinel']}/{SERVICE}"

    def master(self) -> int:
        """The port that the Sentinel names; 0 if it names none."""
        reply = self._ask("sentinel", f"SENTINEL get-master-addr-by-name {SERVICE}").splitlines()
        return int(reply[4]) if len(reply) > 4 else 0

    def in_step(self) -> bool:
        """Whether the Sentinel counts the replica as sound, and the replica says that its link to
        the master is up."""
        master = self.master()
        replica = next(n for n in SERVERS if self._ports[n] != master)
        words = self._ask("sentinel", f"SENTINEL replicas {SERVICE}").splitlines()
        # A field and its value, each after a line with its length.
        flags = words[words.index("flags") + 2] if "flags" in words else ""
        if flags != "slave" or self._processes[replica].poll() is not None:
            return False
        return "master_link_status:up" in self._ask(replica, "INFO replication")

    def revive(self, port: int) -> None:
        """Start the server of ``port`` again, as a replica of the master, unless it runs."""
        name = next(n for n in SERVERS if self._ports[n] == port)
        if self._processes[name].poll() is not None:
            self._serve(name, replica_of=self.master())

    def _ask(self, name: str, command: str) -> str:
        return _ask(f"127.0.0.1:{self._ports[name]}", command)

    def kill_master(self) -> int:
        """Kill -9; returns the port of the killed master."""
        port = self.master()
        name = next(n for n, p in self._ports.items() if p == port)
        self._processes[name].kill()
        self._processes[name].wait()
        return port

    def _serve(self, name: str, replica_of: int | None = None) -> None:
        quiet = ("--save", "", "--appendonly", "no", "--bind", "127.0.0.1")
        quick = ("--repl-diskless-sync-delay", "0")
        of = () if replica_of is None else ("--replicaof", f"127.0.0.1 {replica_of}")
        self._start(name, server_binary(), "--port", str(self._ports[name]), *quiet, *quick, *of)

    def _start(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                (*lifeline.prefix(), *command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                process_group=0,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if "PONG" in self._ask(name, "PING"):
                    return
            time.sleep(0.02)
        raise TmdError(f"{command[0]} did not start (see {self._folder / name}.log)")


def server_binary() -> str:
    """A server program that can also be a Sentinel.

    Raises:
        ConfigError: none is installed.
    """
    if found := embedded.find_binary():
        return found
    raise ConfigError(
        "there is no server that can be a Sentinel: install redis-server or valkey-server"
    )


def _ask(address: Path | str, command: str) -> str:
    """Send one command in Redis' inline form; returns the immediate answer."""
    with _connected(address) as connection:
        connection.sendall(command.encode() + b"\r\n")
        return connection.recv(1 << 16).decode(errors="replace")


def _connected(address: Path | str) -> socket.socket:
    if isinstance(address, str):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=2.0)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(2.0)
    connection.connect(str(address))
    return connection


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports

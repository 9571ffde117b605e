"""Protected Redis servers: by the ACL that tmd ships, or by TLS."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ACL = Path(__file__).parents[2] / "systemd" / "redis.acl"
START_S = 10.0


def member_url(port: int) -> str:
    return f"redis://tmd:member@127.0.0.1:{port}/0"


def subscriber_url(port: int) -> str:
    return f"redis://tmd-alerts:subscriber@127.0.0.1:{port}/0"


def shipped_users() -> str:
    """The shipped file, with the passwords that the URLs above name."""
    return ACL.read_text().replace(">CHANGE-ME-TOO", ">subscriber").replace(">CHANGE-ME", ">member")


@contextlib.contextmanager
def guarded(binary: str, folder: Path) -> Iterator[int]:
    """A server with the users of the shipped file; yields its port."""
    users = folder / "users.acl"
    users.write_text(shipped_users())
    with _server(binary, folder, "--aclfile", str(users)) as port:
        yield port


@contextlib.contextmanager
def plain(
    binary: str, folder: Path, *options: str
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A server; yields its port and its process."""
    folder.mkdir(parents=True, exist_ok=True)
    with _started(binary, folder, *options) as (port, process):
        yield port, process


class Trio(NamedTuple):
    """Three Sentinels that watch a server and its replica."""

    url: str
    sentinels: tuple[int, ...]
    """Their ports."""
    servers: dict[int, subprocess.Popen[bytes]]
    """By port, the first one the master at the start."""


@contextlib.contextmanager
def trio(binary: str, folder: Path) -> Iterator[Trio]:
    """Two Sentinels must agree before the replica becomes the master."""
    quick = ("--repl-diskless-sync-delay", "0")
    with contextlib.ExitStack() as stack:
        master, first = stack.enter_context(plain(binary, folder / "first", *quick))
        of = ("--replicaof", f"127.0.0.1 {master}")
        replica, second = stack.enter_context(plain(binary, folder / "second", *quick, *of))
        ports = []
        for number in range(3):
            own = folder / f"sentinel-{number}"
            own.mkdir()
            (own / "sentinel.conf").write_text(
                f"sentinel monitor tmd 127.0.0.1 {master} 2\n"
                "sentinel down-after-milliseconds tmd 500\n"
                "sentinel failover-timeout tmd 3000\n"
            )
            port, _ = stack.enter_context(_started(binary, own, sentinel=True))
            ports.append(port)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        servers = {master: first, replica: second}
        yield Trio(f"redis+sentinel://{hosts}/tmd/0", tuple(ports), servers)


@contextlib.contextmanager
def encrypted(binary: str, folder: Path, name: str = "127.0.0.1") -> Iterator[tuple[int, Path]]:
    """A TLS-only server with a certificate for ``name``; yields its port and CA."""
    certificate, key = _certificate(folder, name)
    own = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key))
    trust = ("--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no")
    with _server(binary, folder, *own, *trust, tls=True) as port:
        yield port, certificate


@contextlib.contextmanager
def sentinel_of(binary: str, folder: Path, master: int, certificate: Path) -> Iterator[int]:
    """A TLS-only Sentinel that names the server at port ``master`` as ``tmd``; yields its port."""
    port, log_file = _free_port(), folder / "sentinel.log"
    config = folder / "sentinel.conf"
    config.write_text(
        f"""port 0
tls-port {port}
bind 127.0.0.1
dir {folder}
tls-cert-file {certificate}
tls-key-file {certificate.with_suffix(".key")}
tls-ca-cert-file {certificate}
tls-auth-clients no
tls-replication yes
sentinel monitor tmd 127.0.0.1 {master} 1
"""
    )
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [binary, str(config), "--sentinel"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _await_port(process, port, log_file)
        yield port
    finally:
        process.kill()
        process.wait()


def _certificate(folder: Path, name: str) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with: install openssl")
    certificate, key = folder / "redis.crt", folder / "redis.key"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-keyout", str(key), "-out", str(certificate)),
            *("-subj", "/CN=redis", "-addext", f"subjectAltName=IP:{name}"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@contextlib.contextmanager
def _server(binary: str, folder: Path, *options: str, tls: bool = False) -> Iterator[int]:
    with _started(binary, folder, *options, tls=tls) as (port, _):
        yield port


@contextlib.contextmanager
def _started(
    binary: str, folder: Path, *options: str, tls: bool = False, sentinel: bool = False
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    port = _free_port()
    ports = ("--port", "0", "--tls-port", str(port)) if tls else ("--port", str(port))
    own = (str(folder / "sentinel.conf"), "--sentinel") if sentinel else ("--save", "")
    log_file = folder / "redis.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [binary, *own, *ports, "--bind", "127.0.0.1", "--dir", str(folder), *options],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _await_port(process, port, log_file)
        yield port, process
    finally:
        process.kill()
        process.wait()


def _await_port(process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.01)
    text = log_file.read_text()
    if "tls" in text.lower() and "Bad directive" in text:
        pytest.skip("this redis-server was built without TLS")
    raise AssertionError(f"redis did not start: {text}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Starts daemons as an installation runs them, with all detectors, and measures memory and CPU.

The daemon reads the kernel's log, if this machine has one, an NVML library of the tests that has
eight GPUs, and a tree of sysfs with ten ports. Bytecode is cached, as in any installation.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tmd_detectors.nic.counters import RULES

from tests.plugins.sysfs import Tree
from tmd.lifeline import die_with_parent

CONFIG = """\
[cluster]
name = "{name}"
secret = "only-for-this-benchmark"

[redis]
url = "{redis}"

[host]
name = "host-1"
advertise = "127.0.0.1"
runtime_dir = "{folder}"
state_dir = "{folder}/state"

[log]
level = "warning"
"""
DETECTORS = """
[detectors.xid]
strategy = "advise"
facilities = [0, 1]

[detectors.nvml]
strategy = "advise"
gpus = 8

[detectors.nic]
strategy = "advise"
sys_root = "{tree}/sys"
proc_root = "{tree}/proc"

[detectors.host]
strategy = "advise"

[[detectors.exec.checks]]
name = "healthy"
command = ["/bin/true"]
"""
NONE = '\n[plugins]\ndeny = ["exec", "host", "nic", "nvml", "straggler", "trainer", "xid"]\n'
HTTP = '\n[http]\nlisten = "127.0.0.1:0"\n'
PROGRAM = "tmd.daemon"
"""As systemd starts it."""
START_S = 30.0
PAGE = os.sysconf("SC_PAGE_SIZE")
PRESENT, FRAME = 1 << 63, (1 << 55) - 1
TICKS_S = os.sysconf("SC_CLK_TCK")
SHIM = Path(__file__).parents[1] / "tests/plugins/nvml/shim.c"


class Lab(NamedTuple):
    """What all daemons of a benchmark share."""

    folder: Path
    redis: str
    environment: dict[str, str]


class Daemon(NamedTuple):
    """A running daemon, which alone forms the cluster ``name``."""

    name: str
    process: subprocess.Popen[bytes]
    socket: Path
    log: Path
    start_s: float


def lab(folder: Path, redis: str) -> Lab:
    """Build what the detectors look at, and start one daemon to fill the cache of bytecode.

    Raises:
        RuntimeError: there is no C compiler.
    """
    _ports(Tree(folder / "tree"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError(f"no C compiler (cc) in PATH to build {SHIM}: install gcc")
    target = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{target.name}"]
    subprocess.run([compiler, *flags, "-o", target, SHIM], check=True)
    (folder / "nvml").write_text("count 8\nfield230 0\n")
    environment |= {"LD_LIBRARY_PATH": str(folder), "NVML_SHIM": str(folder / "nvml")}
    made = Lab(folder, redis, environment)
    with running(made, "first", HTTP + DETECTORS) as daemon:
        settled(daemon)
    return made


def _ports(tree: Tree) -> None:
    """Eight InfiniBand ports, each beside a GPU, and two of Ethernet, with all their counters."""
    for n in range(8):
        tree.gpu(f"0000:{n:02x}/0000:{n:02x}:01.0")
        device = tree.pci(f"0000:{n:02x}/0000:{n:02x}:02.0")
        port = tree.rdma(f"mlx5_{n}", device, guid=f"b8ce:f603:00a1:{n:04x}")
        for counter in RULES:
            tree.write(f"{port}/counters/{counter}", 0)
    for n in range(2):
        tree.interface(f"eth{n}", tree.pci(f"0000:80/0000:80:{n + 1:02x}.0"), speed=100_000)


@contextlib.contextmanager
def running(
    lab: Lab, name: str, more: str, *, folder: str = "", **environment: str
) -> Iterator[Daemon]:
    """A daemon of the cluster ``name`` with the sections ``more`` besides the common ones, until
    the end of the context. ``folder``: of its files, if it is not the only daemon of the cluster.

    Raises:
        RuntimeError: it ended by itself.
        TimeoutError: nobody could connect.
    """
    place = lab.folder / (folder or name)
    place.mkdir()
    config, log = place / "tmd.toml", place / "log"
    text = CONFIG.format(name=name, redis=lab.redis, folder=place)
    config.touch(mode=0o600)  # it holds the secret
    config.write_text(text + more.format(tree=lab.folder / "tree"))
    with log.open("ab") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=lab.environment | environment,
            process_group=0,
            preexec_fn=die_with_parent,
        )
    try:
        _await_socket(process, place / "tmd.sock", log)
        seconds = time.perf_counter() - started
        yield Daemon(name, process, place / "tmd.sock", log, seconds)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_socket(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    """Wait until a connection is accepted by the kernel, asking every millisecond."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(
                f"the daemon ended ({process.returncode}): {log.read_text()[-2000:]}"
            )
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
            contextlib.suppress(OSError),
        ):
            probe.connect(str(path))
            return
        time.sleep(0.001)
    raise TimeoutError(f"no connection within {START_S:g} s: {log.read_text()[-2000:]}")


def settled(daemon: Daemon, seconds: float = 3.0) -> None:
    """Give it time to lead and every detector time for its first look."""
    time.sleep(seconds)
    if daemon.process.poll() is not None:
        raise RuntimeError(f"the daemon ended: {daemon.log.read_text()[-2000:]}")


def family(daemon: Daemon) -> list[int]:
    """The daemon and its child processes."""
    pid = daemon.process.pid
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [pid, *(int(p) for task in tasks for p in (task / "children").read_text().split())]


def memory(daemon: Daemon) -> dict[str, Any]:
    """Megabytes of the whole family. ``once_mb`` counts a page once that several of its processes
    share. The proportional size (PSS) would give part of it to unrelated processes, and the sum of
    resident sizes counts the interpreter once for each process."""
    pids = family(daemon)
    pages = [_pages(pid) for pid in pids]
    maps = Path(f"/proc/{pids[0]}/maps").read_text()
    return {
        "rss_mb": sum(map(len, pages)) * PAGE / 1e6,
        "daemon_rss_mb": len(pages[0]) * PAGE / 1e6,
        "once_mb": len(set().union(*pages)) * PAGE / 1e6,
        "processes": len(pids),
        "torch_mapped": "/torch/" in maps or "libtorch" in maps,
    }


def _pages(pid: int) -> list[int]:
    """Frames of memory that the process has mapped now (Documentation/admin-guide/mm/pagemap);
    the kernel tells them to root only.

    Raises:
        RuntimeError: we are not root.
    """
    if os.geteuid() != 0:
        raise RuntimeError("run this as root: only root may read page frames in /proc/PID/pagemap")
    found = []
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            first, last = (int(word, 16) // PAGE for word in line.split(" ", 1)[0].split("-"))
            if line.endswith("[vsyscall]"):
                continue  # beyond what the file covers
            pagemap.seek(first * 8)
            entries = array("Q", pagemap.read((last - first) * 8))
            found += [entry & FRAME for entry in entries if entry & PRESENT]
    return found


def cpu_s(daemon: Daemon) -> float:
    """Processor seconds of the family so far, those of ended children included."""
    ticks = 0
    for pid in family(daemon):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(int(n) for n in fields[11:15])
    return ticks / TICKS_S

"""What the daemon of a host costs: the time from its start until a trainer can connect to its Unix
socket, its memory, and that it never maps torch.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import Report, each, in_turn, options
from tmd import embedded
from tmd.lifeline import die_with_parent

CONFIG = """\
[cluster]
name = "bench"
secret = "only-for-this-benchmark"

[redis]
url = "{redis}"

[host]
name = "host-1"
advertise = "127.0.0.1"
runtime_dir = "{folder}"
state_dir = "{folder}/state"
"""
START_S = 30.0
SETTLE_S = 2.0
"""Until the memory is read: by then the daemon leads and all its loops have turned."""
START_LIMIT_S, RSS_LIMIT_MB = 1.0, 80.0


def run_daemon(folder: Path, redis: str) -> list[dict[str, Any]]:
    """Start one daemon, look at it, end it.

    Raises:
        RuntimeError: it ended by itself.
        TimeoutError: nobody could connect.
    """
    folder.mkdir()
    config, log = folder / "tmd.toml", folder / "log"
    config.write_text(CONFIG.format(redis=redis, folder=folder))
    with log.open("ab") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "tmd.cli", "daemon", "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            preexec_fn=die_with_parent,
        )
    try:
        await_socket(process, folder / "tmd.sock", log)
        seconds = time.perf_counter() - started
        time.sleep(SETTLE_S)
        return [{"start_s": seconds, **look(process.pid)}]
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def await_socket(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
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


def look(pid: int) -> dict[str, Any]:
    """Memory of the process and those it started, and what it has mapped."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    status = [Path(f"/proc/{p}/status").read_text() for p in (pid, *children)]
    rss = [int(text.partition("VmRSS:")[2].split()[0]) * 1024 / 1e6 for text in status]
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {
        "rss_mb": sum(rss),
        "processes": len(rss),
        "torch_mapped": "/torch/" in maps or "libtorch" in maps,
    }


def tell(report: Report, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows and targets; returns the figures."""
    start, rss, torch = (each(runs, key) for key in ("start_s", "rss_mb", "torch_mapped"))
    report.row("exec to first connection", start, "interpreter, imports, Redis, socket")
    report.row("resident memory in MB", rss, f"{SETTLE_S:g} s later; not seconds")
    report.target("start < 1 s", start.get("median"), START_LIMIT_S, at_least=False)
    report.target("resident < 80 MB", rss.get("median"), RSS_LIMIT_MB, at_least=False)
    report.target("torch mapped in no run", torch.get("max"), 0, at_least=False)
    return {"start_s": start, "rss_mb": rss, "torch_mapped": torch}


def main() -> int:
    parser = options("daemon", __doc__, repeats=7)
    args = parser.parse_args()
    if args.quick:
        args.repeats = 1
    report = Report("daemon", args)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch, embedded.redis() as redis:
        report.progress(f"Redis: {redis.kind}")
        for repeat, subject in in_turn(args.repeats, ("daemon",)):
            run = partial(run_daemon, Path(scratch) / str(repeat), redis.url)
            runs += report.attempt(subject, run) or []
    return report.finish(runs, tell(report, runs))


if __name__ == "__main__":
    raise SystemExit(main())

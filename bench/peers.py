"""The peer to beat, measured beside tmd: torchft losing one of four replicas to kill -9.

It is installed into a virtual environment of its own, at the first run. Settings tuned for a quick
recovery: heartbeat 1 s, join 1 s, quorum tick 50 ms, operations time out after 2 s; the state comes
over torchft's default transport. tmd runs the same model in the same turn. If torchft cannot be
installed here, only the reason is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench import downtime, rivals
from bench.measure import Report, each, in_turn, options, parsed

VENV = Path("bench/.peers-venv")
PACKAGES = ("torchft-nightly", "torch==2.13.0")
CPU_TORCH = "torch==2.13.0+cpu"
RANKS, KILLED_RANK, KILL_STEP = 4, 2, 25
TINY = ("--width", "64", "--depth", "2", "--heads", "4")
TUNED = ("--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "1000", "--quorum_tick_ms", "50")
INSTALL_S, START_S, RUN_S = 1200.0, 10.0, 240.0


def install(venv: Path) -> str:
    """Make the environment if it is not there; returns torchft's version.

    Raises:
        RuntimeError: it cannot be installed here.
    """
    pip = (str(venv / "bin" / "python"), "-P", "-m", "pip", "--disable-pip-version-check")
    if not (venv / "bin" / "torchft_lighthouse").exists():
        call((sys.executable, "-P", "-m", "venv", str(venv)))
        (venv / ".gitignore").write_text("*\n")
        # The CPU build first: the same library without gigabytes of CUDA packages.
        with contextlib.suppress(RuntimeError):
            call((*pip, "install", "--quiet", CPU_TORCH))
        call((*pip, "install", "--quiet", *PACKAGES))
    shown = call((*pip, "show", "torchft-nightly"))
    return next(x.split()[1] for x in shown.splitlines() if x.startswith("Version:"))


def call(command: tuple[str, ...]) -> str:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:5])}...: {done.stderr.strip()[-600:]}")
    return done.stdout


def under_torchft(venv: Path, folder: Path, quick: bool) -> list[dict[str, Any]]:
    """One run in which a replica kills itself once.

    Raises:
        RuntimeError: it failed or took too long.
    """
    folder.mkdir()
    step = 6 if quick else KILL_STEP
    # Long enough for the replacement to be back; the run is stopped when it is.
    arguments = (
        *("--trace", str(folder / "trace"), "--steps", "100000"),
        *("--kill-rank", str(KILLED_RANK), "--kill-step", str(step), *(TINY if quick else ())),
    )
    torchrun = (
        *(str(venv / "bin" / "python"), "-P", "-m", "torch.distributed.run", "--nnodes=1"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--max-restarts=3"),
        *("--monitor-interval=0.1", "--nproc-per-node=1", "-m", "bench.torchft_train", *arguments),
    )
    with contextlib.ExitStack() as stack:
        log = folder / "log"
        variables = {
            "TORCHFT_LIGHTHOUSE": lighthouse(stack, venv, log),
            "NUM_REPLICA_GROUPS": str(RANKS),
        }
        for rank in range(RANKS):
            named = {**variables, "REPLICA_GROUP_ID": str(rank)}
            stack.enter_context(rivals.started(torchrun, folder / f"log-{rank}", named))
        return [await_recovery(folder, time.monotonic() + RUN_S)]


def lighthouse(stack: contextlib.ExitStack, venv: Path, log: Path) -> str:
    """Start torchft's coordinator on a free port; returns its address.

    Raises:
        RuntimeError: it does not say where it listens.
    """
    command = (str(venv / "bin" / "torchft_lighthouse"), "--min_replicas", str(RANKS - 1))
    stack.enter_context(
        rivals.started((*command, *TUNED, "--bind", "127.0.0.1:0"), log, {"RUST_BACKTRACE": "1"})
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = re.search(r"http://[^\s:]+:(\d+)", log.read_text())
        if found:
            return f"http://127.0.0.1:{found[1]}"
        time.sleep(0.05)
    raise RuntimeError(f"no address from the lighthouse: {log.read_text()[-600:]}")


def await_recovery(folder: Path, deadline: float) -> dict[str, Any]:
    """The cost of the kill, once all replicas commit steps again.

    Raises:
        RuntimeError: they did not in time.
    """
    reason = "nothing was written"
    while time.monotonic() < deadline:
        time.sleep(0.5)
        try:
            found = rivals.outage(rivals.read(folder / "trace"))
        except RuntimeError as error:
            reason = str(error)
            continue
        if found["whole_again_s"] is not None:
            return found
        reason = "the killed replica did not come back"
    logs = "".join(f.read_text()[-1000:] for f in sorted(folder.glob("log*")))
    raise RuntimeError(f"{reason} within {RUN_S:g} s\n{logs}")


def tell(report: Report, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Rows and target; returns the figures."""
    rows = {
        "downtime_s": "beyond one step",
        "median_step_s": "before the kill",
        "whole_again_s": "kill to first step with all replicas",
        "ranks_at_first_step": "not seconds",
    }
    figures: dict[str, Any] = {}
    for key, remark in rows.items():
        figures[key] = each(runs["torchft"], key)
        report.row(f"torchft: {key}", figures[key], remark)
    lost = [e for e in runs["tmd"] if e["kind"] == "failover"]
    for key in ("downtime_s", "median_step_s"):
        figures[f"tmd {key}"] = each(lost, key)
        report.row(f"tmd: {key}", figures[f"tmd {key}"], rows[key])
    theirs, ours = (figures[k].get("median") for k in ("downtime_s", "tmd downtime_s"))
    figures["ratio torchft/tmd"] = ratio = theirs / ours if theirs and ours and ours > 0 else None
    report.target("downtime of torchft / tmd >= 5", ratio, 5.0, at_least=True)
    return figures


def main() -> int:
    parser = options("peers", __doc__)
    parser.add_argument("--venv", type=Path, default=VENV, help="made if it is not there")
    args = parsed(parser)
    if args.quick:
        args.repeats = 1
    report = Report("peers", args)
    venv = args.venv.absolute()
    try:
        report.progress(f"installing torchft into {venv} unless it is there")
        version = install(venv)
    except RuntimeError as error:
        report.progress(f"torchft cannot be installed here, so nothing was measured: {error}")
        return 0
    report.progress(f"torchft-nightly {version}")
    runs: dict[str, list[dict[str, Any]]] = {"torchft": [], "tmd": []}
    ours = argparse.Namespace(events=1, max_restarts=99, quick=args.quick)
    run: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
        "torchft": lambda folder: under_torchft(venv, folder, args.quick),
        "tmd": lambda folder: downtime.under_tmd(folder, TINY if args.quick else (), ours),
    }
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for repeat, subject in in_turn(args.repeats, tuple(runs)):
            report.progress(f"repeat {repeat + 1} of {args.repeats}: {subject}")
            folder = Path(scratch) / f"{subject}-{repeat}"
            runs[subject] += report.attempt(subject, partial(run[subject], folder)) or []
    return report.finish({"torchft-nightly": version, "runs": runs}, tell(report, runs))


if __name__ == "__main__":
    raise SystemExit(main())

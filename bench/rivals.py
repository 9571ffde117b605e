"""Running a rival's job under torchrun, and reading from its trace how long it stood still."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tmd.lifeline import die_with_parent

ROOT = Path(__file__).parents[1]
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torchrun on Gloo does not reliably restart (and with it torchft does not start)."""
BEFORE = 20
"""Steps before a kill from which the median step is taken, as in tmd's own report."""
Line = dict[str, Any]


def environment() -> dict[str, str]:
    """For workers of a rival: one thread each as with tmd, nothing of tmd's own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TMD_")}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, variables: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block; its workers end with it (``die_with_parent``)."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment(), **(variables or {})},
            process_group=0,
            preexec_fn=die_with_parent,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def torchrun(
    arguments: Sequence[str],
    ranks: int,
    folder: Path,
    within_s: float,
    module: str = "bench.torchrun_train",
) -> list[Line]:
    """Run ``module`` to its end; returns its trace.

    Raises:
        RuntimeError: it failed or took too long; the message has the end of its output.
    """
    folder.mkdir(parents=True)
    trace, log = folder / "trace", folder / "log"
    command = [
        *(sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"),
        *("--monitor-interval=0.1", f"--nproc-per-node={ranks}", "-m", module),
        *("--trace", str(trace), *arguments),
    ]
    with started(command, log, OWN_STORE) as process:
        try:
            code: int | str = process.wait(within_s)
        except subprocess.TimeoutExpired:
            code = f"nothing after {within_s:g} s"
    if code != 0:
        raise RuntimeError(f"torchrun failed ({code}):\n{log.read_text()[-2000:]}")
    return read(trace)


def read(folder: Path) -> list[Line]:
    """All lines of a run by time; one cut off by a kill is left out."""
    lines = []
    for file in folder.glob("*.jsonl"):
        for text in file.read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return sorted(lines, key=lambda line: float(line["at"]))


def step_seconds(lines: Sequence[Line], rank: int = 0) -> float:
    """Median time between two commits of ``rank``.

    Raises:
        RuntimeError: there are fewer than two.
    """
    gaps = [float(b["at"] - a["at"]) for a, b in pairwise(x for x in lines if x["rank"] == rank)]
    if not gaps:
        raise RuntimeError("the trace has fewer than two commits")
    return statistics.median(gaps)


def outage(lines: Sequence[Line]) -> dict[str, float | None]:
    """What the kill in this trace cost.

    The downtime goes from the kill to the commit, on the last rank that makes it, of the step in
    which it happened: the first that had not been completed; less one median step. The pause is the
    same from the last commit before the kill on.

    Raises:
        RuntimeError: there was no kill, or no new step after it.
    """
    kill = next((line for line in lines if "killed" in line), None)
    if kill is None:
        raise RuntimeError("the fault was not reached")
    commits = [line for line in lines if "loss" in line]
    old = [c for c in commits if c["at"] < kill["at"]]
    new = [c for c in commits if c["at"] > kill["at"] and c["step"] == kill["killed"]]
    if not new:
        raise RuntimeError("the job did not come back")
    usual = step_seconds([c for c in old if c["step"] >= kill["killed"] - BEFORE - 1])
    first: dict[int, float] = {}
    for commit in new:
        first.setdefault(commit["rank"], commit["at"])
    after = max(first.values())
    ranks = max(c["ranks"] for c in commits)
    whole = [c["at"] for c in commits if c["step"] >= kill["killed"] and c["ranks"] == ranks]
    again = {c["step"] for c in commits if c["attempt"] and c["step"] < kill["killed"]}
    return {
        "downtime_s": after - kill["at"] - usual,
        "pause_s": after - max(c["at"] for c in old) - usual,
        "median_step_s": usual,
        "repeated_steps": len(again),
        "ranks_at_first_step": new[0]["ranks"],
        "whole_again_s": min(whole) - kill["at"] if whole else None,
    }

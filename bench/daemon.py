"""What the daemon of a host costs, and how fast it reacts.

Measured are: the time from its start until a trainer can connect; processor and memory with all
detectors at work; the time from a line of the kernel log to a subscriber, and from the exit of a
worker to a stored plan; and a flood of the kernel log.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench import feeding, speaking
from bench.hosts import DETECTORS, HTTP, NONE, Lab, cpu_s, lab, memory, running, settled
from bench.measure import Report, each, in_turn, options, parsed
from tmd import embedded

SIDES = {
    "all": DETECTORS,
    "plain": DETECTORS.replace("gpus = 8", "enabled = false"),
    "none": NONE,
    "http": HTTP + DETECTORS,
}
"""All detectors at work, all but that of the GPU driver, none, and all with HTTP served."""
CPU_LIMIT, RSS_LIMIT_MB, START_LIMIT_S = 0.005, 60.0, 0.5
LINE_LIMIT_S, PLAN_LIMIT_S, GROWTH_LIMIT_MB = 0.020, 0.050, 2.0

Runs = list[dict[str, Any]]


def start(lab: Lab, repeat: int) -> Runs:
    """From exec to the first connection."""
    with running(lab, f"start-{repeat}", DETECTORS) as daemon:
        return [{"start_s": daemon.start_s}]


def rest(lab: Lab, repeats: int, seconds: float) -> Runs:
    """Daemons that have nothing to do but to watch, all at once, each leader of its own cluster."""
    with ExitStack() as stack:
        daemons = [
            (side, stack.enter_context(running(lab, f"{side}-{repeat}", SIDES[side])))
            for repeat, side in in_turn(repeats, tuple(SIDES))
        ]
        settled(daemons[-1][1])
        before = [(time.perf_counter(), cpu_s(daemon)) for _, daemon in daemons]
        time.sleep(seconds)
        shares = [
            (cpu_s(daemon) - cpu) / (time.perf_counter() - at)
            for (_, daemon), (at, cpu) in zip(daemons, before, strict=True)
        ]
        return [
            {"side": side, "cpu": share, **memory(daemon)}
            for (side, daemon), share in zip(daemons, shares, strict=True)
        ]


def measured(report: Report, lab: Lab, repeats: int, seconds: float) -> dict[str, Runs]:
    """All runs, by what was measured."""
    runs: dict[str, Runs] = {
        "rest": report.attempt("rest", partial(rest, lab, repeats, seconds)) or []
    }
    path = feeding.install(lab.folder)
    parts = {
        "start": partial(start, lab),
        "lines": partial(speaking.lines, lab),
        "plans": partial(speaking.plans, lab),
        "flood": partial(feeding.flood, lab, path=path),
    }
    for repeat, subject in in_turn(repeats, tuple(parts)):
        report.progress(f"{subject} {repeat + 1}/{repeats}")
        found = report.attempt(subject, partial(parts[subject], repeat))
        runs.setdefault(subject, []).extend(found or [])
    return runs


def tell(report: Report, runs: dict[str, Runs]) -> dict[str, Any]:
    """Rows and targets; returns the figures."""
    sides = {side: [r for r in runs["rest"] if r["side"] == side] for side in SIDES}
    keys = ("cpu", "rss_mb", "once_mb", "daemon_rss_mb", "processes", "torch_mapped")
    rests = {side: {key: each(found, key) for key in keys} for side, found in sides.items()}
    others = {
        subject: {key: each(runs[subject], key) for key in (runs[subject] or [{}])[0]}
        for subject in ("start", "lines", "plans", "flood")
    }
    figures = {**rests["all"], **{k: v for one in others.values() for k, v in one.items()}}
    figures |= {
        f"{k}_{side}": v for side in ("plain", "none", "http") for k, v in rests[side].items()
    }
    for what, key, remark in ROWS:
        report.row(what, figures.get(key, {"n": 0}), remark)
    for text, key, statistic, limit in TARGETS:
        report.target(text, figures.get(key, {}).get(statistic), limit, at_least=False)
    return figures


ROWS = (
    ("exec to first connection", "start_s", "interpreter, imports, socket"),
    ("share of a core, all detectors", "cpu", "with its children; not seconds"),
    ("the same without detectors", "cpu_none", "the loops alone"),
    ("memory in MB, all detectors", "once_mb", "pages its processes share once"),
    ("resident MB, all detectors", "rss_mb", "sum over its processes"),
    ("resident MB, the daemon alone", "daemon_rss_mb", ""),
    ("resident MB, no GPU driver", "rss_mb_plain", "nothing for nvml to ask"),
    ("resident MB without detectors", "rss_mb_none", ""),
    ("resident MB with HTTP", "rss_mb_http", "all detectors"),
    ("memory in MB with HTTP", "once_mb_http", "all detectors"),
    ("kernel-log line to subscriber", "line_s", "written to /dev/kmsg"),
    ("PUBLISH to subscriber alone", "floor_s", "same run"),
    ("exit reported to alert received", "exit_to_alert_s", ""),
    ("exit reported to plan stored", "exit_to_plan_s", ""),
    ("alert received to plan stored", "alert_to_plan_s", "negative: plan first"),
    ("flood: lines per second", "offered_per_s", "not seconds"),
    ("flood: part left out", "left_out", "the reader was slower"),
    ("flood: growth in MB", "grown_mb", "of the daemon, after 10 s of it"),
    ("flood: share of a core", "flood_cpu", ""),
    ("flood: another line arrives", "heard_s", "written at its end"),
)
TARGETS = (
    ("start < 0.5 s", "start_s", "median", START_LIMIT_S),
    ("all detectors < 0.5 % of a core", "cpu", "median", CPU_LIMIT),
    ("memory, all detectors, < 60 MB", "once_mb", "median", RSS_LIMIT_MB),
    ("sum of resident sizes < 60 MB", "rss_mb", "median", RSS_LIMIT_MB),
    ("sum of resident sizes without a GPU driver < 60 MB", "rss_mb_plain", "median", RSS_LIMIT_MB),
    ("torch mapped in no run", "torch_mapped", "max", 0),
    ("kernel-log line to subscriber < 20 ms", "line_s", "median", LINE_LIMIT_S),
    ("alert to stored plan < 50 ms", "alert_to_plan_s", "median", PLAN_LIMIT_S),
    ("exit reported to stored plan < 50 ms", "exit_to_plan_s", "median", PLAN_LIMIT_S),
    ("a flood grows memory < 2 MB", "grown_mb", "median", GROWTH_LIMIT_MB),
)


def main() -> int:
    parser = options("daemon", __doc__, repeats=5)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of watching, for the processor"
    )
    args = parsed(parser)
    if args.quick:
        args.repeats, args.seconds = 1, 2.0
    report = Report("daemon", args)
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch, embedded.redis() as redis:
        report.progress(f"Redis: {redis.kind}")
        runs = measured(report, lab(Path(scratch), redis.url), args.repeats, args.seconds)
    return report.finish(runs, tell(report, runs))


if __name__ == "__main__":
    raise SystemExit(main())

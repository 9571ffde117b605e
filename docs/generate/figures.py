"""Tables of what was measured, from ``bench/results``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parents[2] / "bench" / "results"
SIZES = ("10M", "60M", "140M", "200M")
MEASURED_HOT = ("10M", "60M", "140M")
MEASURED_WITHIN = ("10M",)
"""Sizes for which steps of one run are compared, by ``bench.finishing``."""


class Row(NamedTuple):
    """One line of a table: where its figure stands, and how it is shown."""

    label: str
    file: str
    path: tuple[str, ...]
    unit: str = "s"
    scale: float = 1.0
    digits: int = 3


@cache
def result(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{file}.json").read_text())
    return found


def facts(row: Row) -> dict[str, Any]:
    """Median, min, max and n; a single number counts as its own median."""
    found: Any = result(row.file)["figures"]
    for name in row.path:
        found = found[name]
    if not isinstance(found, dict):
        return {"median": found, "n": 1}
    if row.path[-1] == "stayers_growth_bytes":  # of a whole run, and stated with each of its moves
        runs = result(row.file)["runs"][row.path[0]]
        return {**found, "n": len({run["stayers_growth_bytes"] for run in runs})}
    return found


def _cell(row: Row, value: float | None) -> str:
    return "" if value is None else f"{row.scale * value:.{row.digits}f}"


def cpu(file: str) -> str:
    """The processor on which ``file`` was measured."""
    return str(result(file)["machine"].get("cpu", "AMD EPYC")).replace("(R)", "").split(" Proc")[0]


def table(rows: list[Row]) -> str:
    """One figure a line and one number a cell."""
    lines = [
        "| what | unit | median | least | greatest | n | CPU | file |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = facts(row)
        numbers = (_cell(row, found.get(key)) for key in ("median", "min", "max"))
        cells = (row.label, row.unit, *numbers, str(found["n"]), cpu(row.file), f"`{row.file}`")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def of_size(file: str, way: str, size: str) -> str:
    """The file of a model of ``size``: that of 10M parameters bears no size in its name."""
    return file if size == "10M" else f"{file}_{size}"


def by_size(
    file: str,
    noun: str,
    sizes: Sequence[int],
    figures: Sequence[tuple[str, str, str, float, int]],
    *between: str,
) -> list[Row]:
    """Rows of ``figures`` (key, words, unit, scale, digits) for each size, a number of ``noun``.

    ``between``: the keys in ``file`` between a size and its figures.
    """
    return [
        Row(f"{size:,} {noun}: {words}", file, (str(size), *between, key), unit, scale, digits)
        for size in sizes
        for key, words, unit, scale, digits in figures
    ]


def pauses() -> str:
    """Planned moves: median and its interval."""
    head = "| way | parameters | median step, s | median pause, s | 95 % from, s | 95 % to, s | n |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for way, words in (("shadow", "live shadow"), ("copy", "stop-and-copy")):
        for size in SIZES:
            found = result(of_size("pause", way, size))["figures"][f"{way} {size}"]
            pause, step = found["pause_s"], found["median_step_s"]["median"]
            low, high = pause["interval_95"]
            numbers = f"{step:.2f} | {pause['median']:.3f} | {low:.3f} | {high:.3f}"
            lines.append(f"| {words} | {size} | {numbers} | {pause['n']} |")
    for file, size in (("restart", "10M"), ("restart", "60M"), ("restart_200M", "200M")):
        found = result(file)["figures"][f"torchrun {size}"]
        numbers = f"{found['median_step_s']['median']:.2f} | {found['pause_s']['median']:.3f} | | "
        lines.append(f"| torchrun, restarted | {size} | {numbers} | {found['pause_s']['n']} |")
    return "\n".join(lines)


def hot() -> str:
    """kill -9 with a hot standby, by model size: the step finished, and repeated."""
    rows = []
    for size in MEASURED_HOT:
        file = of_size("hot", "hot", size)
        rows.append(Row(f"{size}: median step", file, (f"hot {size}", "median_step_s")))
        for way, words in (("hot", "the step goes on"), ("repeat", "it is repeated")):
            place = f"{way} {size}"
            many = f"of {len(result(file)['runs'][place])}"
            rows += [
                Row(f"{size}, {words}: set back", file, (place, "set_back_s")),
                Row(f"{size}, {words}: in steps", file, (place, "set_back_steps"), "steps"),
                Row(
                    f"{size}, {words}: losses that repeat it",
                    file,
                    (place, "repeating"),
                    many,
                    digits=0,
                ),
            ]
        label = f"{size}: step that could be finished, to one that could not"
        if size in MEASURED_WITHIN:
            within = of_size("finishing", "hot", size)
            rows.append(Row(label, within, (size, "ratio"), "times"))
        else:
            rows.append(Row(label, file, (f"steady {size}",), "times"))
    return table(rows)


MOVES = [
    Row(f"pause, {words}", "pause_gradients", (f"{way} 10M", "pause_s"))
    for way, words in (
        ("shadow", "live shadow"),
        ("gradients", "live shadow, by gradients only"),
        ("copy", "stop-and-copy"),
    )
]

KILL = [
    Row("tmd: downtime of kill -9, beyond one step", "downtime", ("tmd: downtime after kill -9",)),
    Row("of it: detect", "downtime", ("detect",)),
    Row("of it: decide", "downtime", ("decide",)),
    Row("of it: prepare (the rest of the broken step)", "downtime", ("prepare",)),
    Row("of it: transfer (the copy of the state)", "downtime", ("transfer",)),
    Row("of it: resume", "downtime", ("resume",)),
    Row(
        "tmd in another run: a broken step computed to its end",
        "downtime_early",
        ("tmd: downtime after kill -9",),
    ),
    Row(
        "beside it: left early (`leave_early=True`)",
        "downtime_early",
        ("tmd, left early: downtime after kill -9",),
    ),
    Row("of the former: prepare", "downtime_early", ("prepare",)),
    Row("of the latter: prepare", "downtime_early", ("left early: prepare",)),
    Row("torchrun, checkpoint each step", "downtime", ("torchrun: downtime after kill -9",)),
    Row("ratio torchrun to tmd", "downtime", ("ratio torchrun/tmd",), "times", digits=1),
    Row("tmd, beside torchft", "peers", ("tmd downtime_s",)),
    Row("torchft, tuned", "peers", ("downtime_s",)),
    Row("ratio torchft to tmd", "peers", ("ratio torchft/tmd",), "times", digits=1),
    Row("speed of the copy", "downtime", ("copy in GB/s, both",), "GB/s", digits=2),
]
GPU = [
    Row("1 rank, the card busy: step through tmd / on NCCL", "gpu", ("ratio 1", "ratio"), "times"),
    Row("4 ranks: the same", "gpu", ("ratio 4", "ratio"), "times"),
    Row("1 rank, small kernels only: the same", "gpu_launches", ("ratio",), "times"),
    Row("drain: pause", "gpu", ("moves", "pause_s")),
    Row("drain: median step before", "gpu", ("moves", "median_step_s")),
    Row("kill -9: downtime", "gpu", ("kill -9", "downtime_s")),
    Row("kill -9: median step before", "gpu", ("kill -9", "median_step_s")),
    Row("SIGSTOP: downtime", "gpu", ("SIGSTOP", "downtime_s")),
]
STEADY = [
    Row("step with session and vote", "steady", ("tmd",)),
    Row("step of plain DDP on Gloo", "steady", ("gloo",)),
    Row("ratio, pair by pair", "steady", ("ratio by repeat",), "times", digits=2),
    *(
        Row(f"{name}: {label}", "frameworks", (key, column), unit, digits=digits)
        for key, name in (("transformers", "Trainer of transformers"), ("lightning", "Lightning"))
        for label, column, unit, digits in (
            ("step with the adapter", "tmd", "s", 3),
            ("step on Gloo", "gloo", "s", 3),
            ("ratio, pair by pair", "ratio by repeat", "times", 2),
        )
    ),
    Row("DDP through a passing group on Gloo to Gloo itself", "passing", ("ratio",), "times"),
    Row("step of FSDP2 with a snapshot every ten steps", "snapshots", ("snapshots",)),
    Row("step of FSDP2 without", "snapshots", ("none",)),
    Row("ratio, repeat by repeat", "snapshots", ("ratio by repeat",), "times", digits=2),
    Row("step before Redis is killed", "away", ("before",)),
    Row("step while Redis is away for five minutes", "away", ("away",)),
    Row("step after Redis came back empty", "away", ("after",)),
    Row("growth of a daemon meanwhile", "away", ("growth_mb",), "MB", digits=2),
    Row("efficiency with a drain every ten seconds", "efficiency", ("efficiency",), "part"),
    Row("speed on these shared cores meanwhile", "efficiency", ("speed on these cores",), "part"),
    Row("the joiner's own work", "efficiency", ("joiner",), "cores"),
    Row("abort of a collective", "abort", ("abort_s",), "ms", 1000.0),
]
FIRST = [
    Row(
        "compiled, standby rehearsed", "first_step", ("rehearsed kill", "ratio"), "steps", digits=2
    ),
    Row(
        "compiled, neutral iterations only",
        "first_step",
        ("neutral kill", "ratio"),
        "steps",
        digits=2,
    ),
    Row(
        "summed by hand, rehearsed",
        "first_step_by_hand",
        ("rehearsed kill", "ratio"),
        "steps",
        digits=2,
    ),
    Row(
        "summed by hand, neutral",
        "first_step_by_hand",
        ("neutral kill", "ratio"),
        "steps",
        digits=2,
    ),
    Row(
        "summed by hand, no iteration",
        "first_step_by_hand",
        ("cold kill", "ratio"),
        "steps",
        digits=2,
    ),
]
LAYOUTS = [
    *(
        Row(
            f"{words}: pause of a drained host",
            "layouts",
            (name, "part_of_step"),
            "% of a step",
            100.0,
            1,
        )
        for name, words in (
            ("hybrid", "HSDP"),
            ("tensor", "tensor parallel"),
            ("both", "tensor parallel with FSDP2"),
            ("experts", "expert parallel"),
            ("pipeline", "pipeline"),
        )
    ),
    *(
        Row(
            f"{words}: two workers killed, less step and copy",
            "layouts",
            (name, "downtime_less_copy_s"),
        )
        for name, words in (
            ("hybrid", "HSDP"),
            ("tensor", "tensor parallel"),
            ("experts", "expert parallel"),
            ("pipeline", "pipeline"),
        )
    ),
]
GROWTH = by_size(
    "growth",
    "ranks",
    (4, 32),
    (
        ("links", "links opened", "links", 1.0, 0),
        ("handshake_bytes", "bytes of handshakes", "bytes", 1.0, 0),
        ("preparation_s", "CPU while it prepares", "ms", 1000.0, 2),
        ("switch_s", "CPU at the switch", "ms", 1000.0, 2),
    ),
    "with new links",
)
MEMORY = [
    Row(label, file, (runs, "stayers_growth_bytes"), "MB", digits=1)
    for label, file, runs in (
        ("10M, live shadow, 20 moves", "pause", "shadow 10M"),
        ("10M, stop-and-copy, 20 moves", "pause", "copy 10M"),
        ("10M, no move", "pause", "nothing 10M"),
        ("60M, live shadow, 10 moves", "pause_60M", "shadow 60M"),
        ("60M, no move", "undisturbed_60M", "nothing 60M"),
        ("200M, live shadow, 10 moves", "pause_200M", "shadow 200M"),
        ("200M, no move", "undisturbed_200M", "nothing 200M"),
        ("60M, tensors mapped, 20 moves", "stayers_60M", "shadow 60M"),
        ("60M, tensors mapped, no move", "stayers_60M", "nothing 60M"),
        ("200M, tensors mapped, 20 moves", "stayers_200M", "shadow 200M"),
    )
]
DAEMON = [
    Row("start to first connection", "daemon", ("start_s",), digits=2),
    Row("CPU at rest, all detectors", "daemon", ("cpu",), "% of a core", 100.0, 2),
    Row("CPU at rest, no detector", "daemon", ("cpu_none",), "% of a core", 100.0, 2),
    Row("memory, GPU driver and ten ports", "daemon", ("once_mb",), "MB", digits=1),
    Row("the same, sum of resident sizes", "daemon", ("rss_mb",), "MB", digits=1),
    Row("memory, no GPU driver", "daemon", ("once_mb_plain",), "MB", digits=1),
    Row("memory, no detector", "daemon", ("once_mb_none",), "MB", digits=1),
    Row("memory, with HTTP", "daemon", ("once_mb_http",), "MB", digits=1),
    Row("kernel-log line to a subscriber", "daemon", ("line_s",), "ms", 1000.0, 1),
    Row("`PUBLISH` of Redis alone", "daemon", ("floor_s",), "ms", 1000.0, 1),
    Row("exit of a worker to the stored plan", "daemon", ("exit_to_plan_s",), "ms", 1000.0, 1),
    Row("memory growth in a flood of 100,000 lines/s", "daemon", ("grown_mb",), "MB", digits=1),
    Row("lines left out in that flood", "daemon", ("left_out",), "%", 100.0, 0),
    Row("another line heard after the flood", "daemon", ("heard_s",), "ms", 1000.0, 0),
]

DECISIONS = by_size(
    "decisions",
    "ranks",
    (1_024, 16_384),
    (
        ("form", "form the job", "ms", 1000.0, 1),
        ("policy", "ask a policy about a lost worker", "ms", 1000.0, 1),
        ("steer", "open the failover", "ms", 1000.0, 1),
        ("gap", "look whether a standby covers each rank", "ms", 1000.0, 1),
        ("directive", "derive a worker's directive", "ms", 1000.0, 1),
        ("encode", "encode the record in a move", "ms", 1000.0, 1),
        ("change", "find what the next revision changes in it", "ms", 1000.0, 1),
        ("apply", "apply that change", "ms", 1000.0, 1),
        ("decode", "decode the record in a move", "ms", 1000.0, 1),
        ("rest_mb", "record at rest", "MB", 1.0, 2),
        ("move_mb", "record in a move", "MB", 1.0, 2),
        ("change_kb", "change that opens the failover", "kB", 1.0, 1),
    ),
)
GOODPUT = [
    Row("goodput of the job", "goodput", ("measured",), "%", 100.0, 1),
    Row("goodput predicted", "goodput", ("predicted",), "%", 100.0, 1),
    Row("difference, as a share of the measured", "goodput", ("difference",), "%", 100.0, 1),
    Row("kills in a run", "goodput", ("kills",), "", 1.0, 0),
]
FLEET = by_size(
    "fleet",
    "hosts",
    (100, 1_000, 10_000),
    (
        ("commands_per_s", "commands to Redis", "a second", 1.0, 0),
        ("host_bytes", "traffic of a host with Redis", "kB/s", 1e-3, 1),
        ("redis_cpu", "Redis", "% of a core", 100.0, 1),
        ("leader_cpu", "the leader's daemon", "% of a core", 100.0, 1),
        ("leader_mb", "its memory", "MB", 1.0, 0),
        ("loss_s", "a worker's end to the stored plan", "ms", 1000.0, 0),
        ("loss_p99_s", "99th percentile of that", "ms", 1000.0, 0),
        ("drain_s", "a drain request to the stored plan", "ms", 1000.0, 0),
        ("drain_p99_s", "99th percentile of that", "ms", 1000.0, 0),
        ("start_s", "start of the leader to all jobs formed", "s", 1.0, 1),
        ("leader_loss_s", "a worker's end just after the leader's, to the plan", "s", 1.0, 1),
        ("emptied_s", "Redis emptied to all jobs back", "s", 1.0, 1),
    ),
)
ELASTIC = [
    Row(words, "elastic", (name,))
    for name, words in (
        ("elastic: downtime after two kills", "goes on: downtime of two kills, beyond one step"),
        ("holds: downtime after two kills", "holds: the same, workers started again at once"),
        ("elastic: step of four workers", "step of four workers"),
        ("elastic: step of two workers", "step of two workers with two ranks each"),
        ("elastic: pause of a move back", "pause of a move back, beyond one step"),
    )
]


COLLECTIVES = [
    Row(f"{size}, {label}", "collectives", (f"{size} {way}",), "ms", 1000.0, 2)
    for size in ("4 kB", "64 kB", "1 MB", "25 MB", "100 MB")
    for way, label in (
        ("tmd", "tmd"),
        ("tmd, finishable", "tmd, each operation could be finished after a loss"),
        ("gloo", "Gloo"),
    )
]


TABLES: dict[str, Callable[[], str]] = {
    "figures-kill": lambda: table(KILL),
    "figures-hot": hot,
    "figures-pauses": pauses,
    "figures-moves": lambda: table(MOVES),
    "figures-steady": lambda: table(STEADY),
    "figures-gpu": lambda: table(GPU),
    "figures-first": lambda: table(FIRST),
    "figures-layouts": lambda: table(LAYOUTS),
    "figures-growth": lambda: table(GROWTH),
    "figures-memory": lambda: table(MEMORY),
    "figures-daemon": lambda: table(DAEMON),
    "figures-decisions": lambda: table(DECISIONS),
    "figures-fleet": lambda: table(FLEET),
    "figures-elastic": lambda: table(ELASTIC),
    "figures-goodput": lambda: table(GOODPUT),
    "figures-collectives": lambda: table(COLLECTIVES),
}

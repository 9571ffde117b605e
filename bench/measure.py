"""What all benchmarks share: taking turns, medians, the machine, tables, targets, the JSON file."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from tmd import embedded

RESULTS = Path("bench/results")
WIDTH = 110
T = TypeVar("T")
Figures = dict[str, Any]
Facts = list[dict[str, Any]]
"""What each event of a run, or the run as a whole, showed."""


def options(name: str, about: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """The options that all benchmarks have. ``about``: text whose first paragraph is for
    --help."""
    first = (about or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=first)
    parser.add_argument("--repeats", type=int, default=repeats)
    file = RESULTS / f"{name}.json"
    parser.add_argument("--json", type=Path, help=f"default: {file}, and none with --quick")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one tiny repeat, to see that all works; its figures mean nothing",
    )
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of this run. ``whole`` says whether it measures all that the figures are made
    from: no option has another value than its default, except that there may be more repeats."""
    args = parser.parse_args()
    changed = {k for k, v in vars(args).items() if v != parser.get_default(k)}
    fewer = args.repeats < parser.get_default("repeats")
    args.whole = changed <= {"repeats", "json"} and not fewer
    return args


def in_turn(repeats: int, subjects: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Each subject once per repeat, every other repeat in reverse: noise hits all alike."""
    for repeat in range(repeats):
        for subject in subjects if repeat % 2 == 0 else reversed(subjects):
            yield repeat, subject


def summary(values: Iterable[float]) -> dict[str, float]:
    """Median, min, max and n; only ``n = 0`` if there is nothing."""
    found = list(values)
    if not found:
        return {"n": 0}
    middle = statistics.median(found)
    return {"median": middle, "min": min(found), "max": max(found), "n": len(found)}


def interval(values: list[float]) -> tuple[float, float] | None:
    """95 % interval of the median by order statistics; ``None`` for fewer than six values."""
    if len(values) < 6:
        return None
    ordered, n = sorted(values), len(values)
    reach = math.ceil(0.98 * math.sqrt(n))
    low, high = max(0, (n - 1) // 2 - reach), min(n - 1, n // 2 + reach)
    return ordered[low], ordered[high]


def commit_times(lines: Iterable[Mapping[str, Any]]) -> list[float]:
    """When the last rank committed each step, by the lines of a :class:`DemoTrace`."""
    times: dict[int, float] = {}
    for line in lines:
        times[line["step"]] = max(line["at"], times.get(line["step"], 0.0))
    return sorted(times.values())


def shown(facts: Mapping[str, float], scale: float = 1.0, digits: int = 3) -> str:
    """``median (min to max)``."""
    if not facts["n"]:
        return "-"
    low, middle, high = (f"{scale * facts[k]:.{digits}f}" for k in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"


def machine() -> dict[str, object]:
    """Where and when this was measured."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "redis": embedded.find_binary() or "fakeredis, in the process of the benchmark",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        **_gpu(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _gpu() -> dict[str, str]:
    """The GPU and its NCCL, if the benchmark has loaded torch and torch finds one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    nccl = torch.cuda.nccl.version()
    return {"gpu": torch.cuda.get_device_name(0), "nccl": ".".join(map(str, nccl))}


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def pairs(ours: Facts, theirs: Facts) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What was measured at the same place of the same repeat. A run that failed has no pair."""
    others = {fact["place"]: fact for fact in theirs}
    return [(fact, others[fact["place"]]) for fact in ours if fact["place"] in others]


def paired(ours: Facts, theirs: Facts) -> Figures:
    """Steps on tmd and on Gloo, from runs that took turns: both, and their ratio as a whole and by
    repeat."""
    tmd, gloo = each(ours, "step_s"), each(theirs, "step_s")
    ratio = tmd["median"] / gloo["median"] if tmd["n"] and gloo["n"] else None
    by_repeat = summary(a["step_s"] / b["step_s"] for a, b in pairs(ours, theirs))
    return {"tmd": tmd, "gloo": gloo, "ratio of medians": ratio, "ratio by repeat": by_repeat}


class Report:
    """Rows for people, facts for the file; the targets are in both."""

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        results: Path = RESULTS,
    ) -> None:
        """``args`` is of :func:`parsed`. Only a whole run replaces that in ``results``."""
        self._name, self._args, self._results = name, args, results
        self._machine = machine()
        self._table = Table(title=f"{name}: medians (min to max)", title_justify="left")
        self._targets: list[dict[str, Any]] = []
        self._failed: list[dict[str, str]] = []
        self._console = Console(highlight=False, width=WIDTH)
        for column in ("what", "seconds", "n", "remark"):
            self._table.add_column(column, no_wrap=True)

    def progress(self, text: str) -> None:
        """Say what is going on: a run takes minutes."""
        self._console.print(text, style="dim", markup=False)

    def attempt(self, subject: str, run: Callable[[], T]) -> T | None:
        """The result of one run; if it fails that is a result too, and the others go on."""
        try:
            return run()
        except (RuntimeError, TimeoutError, OSError) as error:
            reason = str(error) or repr(error)
            self._failed.append({"subject": subject, "error": reason})
            self.progress(f"{subject} FAILED: {reason}")
            return None

    def facts(self, subject: str, repeat: int, run: Callable[[], Facts]) -> Facts:
        """The facts of one run, each with its place: the repeat, and its number in the run."""
        found = self.attempt(subject, run) or ()
        return [{**fact, "place": (repeat, number)} for number, fact in enumerate(found)]

    def row(self, what: str, facts: Mapping[str, float], remark: str = "") -> None:
        """One figure."""
        self._table.add_row(what, shown(facts), str(int(facts["n"])), remark)

    def target(self, text: str, value: float | None, limit: float, *, at_least: bool) -> None:
        """State whether ``value`` keeps ``limit``; ``None``: it could not be measured."""
        met = None if value is None else value >= limit if at_least else value <= limit
        self._targets.append({"target": text, "limit": limit, "value": value, "met": met})

    def finish(self, runs: object, figures: Mapping[str, object]) -> int:
        """Print all and write the file; returns the exit status: 1 if a run failed."""
        if self._args.quick:
            self._console.print("--quick: the figures below mean nothing")
        self._console.print(self._table)
        for t in self._targets:
            word = {True: "met", False: "MISSED", None: "not measured"}[t["met"]]
            value = "" if t["value"] is None else f" ({t['value']:.3f})"
            self._console.print(f"target {t['target']}: {word}{value}")
        if self._failed:
            self._console.print(f"runs that failed: {len(self._failed)}")
        self._write(runs, figures)
        return 1 if self._failed else 0

    def _write(self, runs: object, figures: Mapping[str, object]) -> None:
        args = self._args
        part = ".json" if args.whole else ".part.json"
        file = args.json or (None if args.quick else self._results / f"{self._name}{part}")
        if file is None:
            return
        if self._failed:  # it must not replace a good one
            file = file.with_suffix(".failed.json")
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        facts = {
            "benchmark": self._name,
            "machine": self._machine,
            "settings": settings,
            "figures": figures,
            "targets": self._targets,
            "failed_runs": self._failed,
            "runs": runs,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(facts, indent=1) + "\n")
        self._console.print(f"written to {file}")


def median_of(facts: Mapping[str, float]) -> float | None:
    """The median, if there is one."""
    return facts.get("median")


def each(runs: Iterable[Mapping[str, Any]], key: str) -> dict[str, float]:
    """:func:`summary` of one value of each run, leaving out ``None``."""
    return summary(run[key] for run in runs if run[key] is not None)

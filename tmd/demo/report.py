"""Computes from traces and plans what each event cost, and whether all numbers are equal.

Pure functions on lists of dictionaries and stored plans; they use no clock and no process.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from tmd.core.values.model import MigrationPlan, Phase, PlanKind

Line = dict[str, Any]
BEFORE = 20
"""Steps before an event that give the median step."""
AFTER = 10
"""Steps after an event, at whose end connections and memory are compared."""
PARTS = ("detect", "decide", "prepare", "transfer", "resume")
"""Parts of the time that an event took, in order."""


class DemoTrace(Struct, frozen=True):
    """All lines of one run: commits by (rank, step), and spoilt steps."""

    commits: dict[tuple[int, int], Line]
    """The last one of each step, by its epoch and time."""
    undone: tuple[Line, ...]
    earlier: tuple[Line, ...] = ()
    """All others of steps that were committed more than once."""

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for rank, _ in self.commits})

    def of_rank(self, rank: int) -> list[Line]:
        """Commits of ``rank`` by step."""
        return [self.commits[key] for key in sorted(self.commits) if key[0] == rank]

    def differing(self, golden: DemoTrace) -> list[tuple[int, int]]:
        """(step, rank) of each line, in order, whose loss is not the golden one."""
        before = [((line["rank"], line["step"]), line) for line in self.earlier]
        return sorted(
            (step, rank)
            for (rank, step), line in (*self.commits.items(), *before)
            if (known := golden.commits.get((rank, step))) is None or known["loss"] != line["loss"]
        )


class DemoEvent(Struct, frozen=True):
    """One rank moved to another worker."""

    kind: str
    cause: str
    rank: int
    from_host: str
    to_host: str
    pause_s: float | None
    downtime_s: float | None
    idle_s: float | None
    """After a loss: how long no survivor had work. Sum of the time until the loss was known, the
    time from the last survivor's end of the current step to the last start of the next one, and
    the joiner's wait for its state verification in that vote."""
    median_step_s: float
    split: dict[str, float]
    """Seconds in each of :data:`PARTS`, from the fault or the request."""
    repeated_steps: int
    new_connections_per_stayer: dict[str, int]
    stayer_rss_growth_bytes: int
    """Largest growth of the peak resident size of any stayer over the event."""


def read_trace(folder: Path) -> DemoTrace:
    """Everything that the workers of a run have written. A line truncated by a kill is skipped."""
    commits: dict[tuple[int, int], Line] = {}
    earlier, undone = [], []
    for file in sorted(folder.glob("*.jsonl")):
        for text in file.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if "loss" in line:
                key = line["rank"], line["step"]
                first, last = sorted((commits.get(key, line), line), key=_place)
                if key in commits:
                    earlier.append(first)
                commits[key] = last
            elif "undone" in line:
                undone.append(line)
    return DemoTrace(commits, tuple(undone), tuple(earlier))


def _place(line: Line) -> tuple[int, float]:
    return line["epoch"], line["at"]


def median_step(lines: Sequence[Line]) -> float:
    """Median time between commits, in seconds; 0 for fewer than two."""
    gaps = [b["at"] - a["at"] for a, b in itertools.pairwise(lines)]
    return statistics.median(gaps) if gaps else 0.0


class Comparison(Struct, frozen=True):
    """Two runs, loss by loss."""

    steps: int
    """Number of steps whose losses were compared."""
    unwritten: int
    """Lines missing because a worker was killed right after its commit."""
    difference: str
    """The first difference; empty if all losses are bit-identical, and each step counts once."""


def may_miss(plans: Iterable[MigrationPlan]) -> set[tuple[int, int]]:
    """(rank, step) without a line: a worker killed between its commit and its line leaves none. The
    step is the one before the resume step, the rank one that moved."""
    return {(m.rank, p.resume - 1) for p in plans if p.resume is not None for m in p.moves}


class CommittedTwice(Struct, frozen=True):
    """Two commits of one step by one rank that no plan explains."""

    first: Line
    second: Line

    @property
    def step(self) -> int:
        return int(self.first["step"])

    def __str__(self) -> str:
        one, other = (f"{e['worker']} in epoch {e['epoch']}" for e in (self.first, self.second))
        twice = f"rank {self.first['rank']} committed step {self.step} twice"
        return f"{twice}, as {one} and as {other}, and no plan says why"


def committed_twice(run: DemoTrace, plans: Iterable[MigrationPlan]) -> list[CommittedTwice]:
    """Commits of a step that a rank had committed before, by step. ``plans``: those of the run."""
    known = list(plans)
    lines: dict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in run.earlier:
        lines[line["step"], line["rank"]].append(line)
    return [
        CommittedTwice(first, second)
        for (step, rank), before in sorted(lines.items())
        for first, second in itertools.pairwise(
            sorted([*before, run.commits[rank, step]], key=_place)
        )
        if not any(_explains(plan, first, second) for plan in known)
    ]


def _explains(plan: MigrationPlan, first: Line, second: Line) -> bool:
    """Whether ``plan`` had the step of ``first`` committed again, later and in a new epoch.

    Either it rolls back to that step or to an earlier one, or it begins with that step, since the
    worker of ``first`` was lost and no survivor knew of its commit.
    """
    if plan.resume is None or second["at"] < first["at"]:
        return False
    if not first["epoch"] < plan.new.epoch <= second["epoch"]:
        return False
    if plan.rollback is not None:
        return bool(plan.resume <= first["step"])
    return bool(plan.resume == first["step"]) and first["worker"] in plan.dead


def compare(run: DemoTrace, golden: DemoTrace, plans: Iterable[MigrationPlan]) -> Comparison:
    """Compare every loss of every rank bit for bit.

    ``plans``: those of the run; only lines that :func:`may_miss` names may be missing, and only
    commits that a plan explains may be repeated.
    """
    known = list(plans)
    lawful = may_miss(known)
    missing = golden.commits.keys() - run.commits.keys()
    differing = run.differing(golden)
    difference = ""
    if differing:
        step, rank = differing[0]
        difference = f"{len(differing)} losses differ, the first is of rank {rank} in step {step}"
    elif twice := committed_twice(run, known):
        difference = str(twice[0])
    elif lost := sorted(missing - lawful):
        difference = f"rank {lost[0][0]} wrote no line for step {lost[0][1]}"
    steps = {step for _, step in run.commits.keys() & golden.commits.keys()}
    return Comparison(len(steps), len(missing & lawful), difference)


def events_of(
    trace: DemoTrace,
    plans: Iterable[MigrationPlan],
    started: dict[str, float],
    seen: dict[str, float],
) -> list[DemoEvent]:
    """One event per move of each finished plan.

    Args:
        trace: the run.
        plans: final plans in order.
        started: by plan id: time of the fault or the request (wall clock).
        seen: by plan id: time at which a detector reported the fault.
    """
    return [
        _event(trace, plan, index, started.get(plan.id), seen.get(plan.id))
        for plan in plans
        if plan.phase is Phase.DONE
        for index in range(len(plan.moves))
    ]


def _event(
    trace: DemoTrace, plan: MigrationPlan, index: int, start: float | None, seen: float | None
) -> DemoEvent:
    move = plan.moves[index]
    gaps = _gaps(trace, plan)
    before, after = _around(gaps)
    usual = statistics.median(gap.usual for gap in gaps.values())
    begin = plan.timeline[0].at if start is None else start
    planned = plan.kind is PlanKind.PLANNED
    return DemoEvent(
        kind=plan.kind.value,
        cause=plan.cause,
        rank=move.rank,
        from_host=move.leaver.host,
        to_host=move.joiner.host if move.joiner else "",
        pause_s=after - before - usual if planned else None,
        downtime_s=None if planned else after - begin - usual,
        idle_s=None if planned else _idle(trace, plan, begin),
        median_step_s=usual,
        split=_split(plan, begin, seen, before, after, usual),
        repeated_steps=_repeated(trace, plan),
        new_connections_per_stayer={str(r): gap.links for r, gap in gaps.items()},
        stayer_rss_growth_bytes=max(gap.growth for gap in gaps.values()),
    )


class _Gap(Struct, frozen=True):
    last: float
    first: float
    usual: float
    links: int
    growth: int


def gap_s(trace: DemoTrace, plan: MigrationPlan) -> float:
    """Seconds from the last commit before the epoch of ``plan`` to the first commit in it, on the
    slowest stayer."""
    before, after = _around(_gaps(trace, plan))
    return after - before


def _stayers(trace: DemoTrace, plan: MigrationPlan) -> list[int]:
    moved = {m.rank for m in plan.moves}
    return [rank for rank in trace.ranks if rank not in moved]


def _gaps(trace: DemoTrace, plan: MigrationPlan) -> dict[int, _Gap]:
    """Gap by stayer."""
    return {rank: _gap(trace.of_rank(rank), plan) for rank in _stayers(trace, plan)}


def _around(gaps: dict[int, _Gap]) -> tuple[float, float]:
    """Times of the last old and the last first-new commit among the stayers."""
    return max(gap.last for gap in gaps.values()), max(gap.first for gap in gaps.values())


def _gap(lines: Sequence[Line], plan: MigrationPlan) -> _Gap:
    """The trace of one stayer around its first commit in the new epoch of ``plan``."""
    cut = next((i for i, line in enumerate(lines) if line["epoch"] >= plan.new.epoch), 0)
    if not cut:
        raise RuntimeError(
            f"rank {lines[0]['rank']} trained no step on one side of plan {plan.id}: the steps are "
            "too short for this story; use more of them (--steps)"
        )
    # A joiner dials and follows while the old epoch still trains.
    opened = plan.timeline[0].at
    base = next((line for line in reversed(lines[:cut]) if line["at"] < opened), lines[0])
    old, new = lines[max(0, cut - BEFORE) : cut], lines[cut : cut + AFTER]
    return _Gap(
        last=old[-1]["at"],
        first=new[0]["at"],
        usual=median_step(old),
        links=new[-1]["links_opened"] - base["links_opened"],
        growth=new[-1]["rss_peak"] - base["rss_peak"],
    )


def _split(
    plan: MigrationPlan, begin: float, seen: float | None, before: float, after: float, usual: float
) -> dict[str, float]:
    marks = {mark.phase: mark.at for mark in plan.timeline}
    first = plan.timeline[0].at
    known = first if seen is None else seen
    transfer = plan.timings.get("transfer", 0.0)
    if plan.kind is PlanKind.PLANNED:
        # Preparation runs in the background; only the time after the last old commit is a pause.
        prepared, resume = marks[Phase.READY] - first, after - before - transfer - usual
    else:
        synced = marks[Phase.SYNC]
        prepared, resume = synced - first, after - synced - transfer - usual
    split = {
        "detect": known - begin if plan.kind is PlanKind.FAILOVER else 0.0,
        "decide": first - (known if plan.kind is PlanKind.FAILOVER else begin),
        "prepare": prepared,
        "transfer": transfer,
        "resume": resume,
    }
    return {name: round(seconds, 6) for name, seconds in split.items()}


def _idle(trace: DemoTrace, plan: MigrationPlan, begin: float) -> float | None:
    anew = []
    for rank in trace.ranks:
        new = [line for line in trace.of_rank(rank) if line["epoch"] == plan.new.epoch]
        if not new:
            return None  # lost again before its first commit
        anew.append(float(new[0]["began"]))
    done = max([begin, *_ends(trace, plan)])
    # A rank in a collective waits for the lost rank until the loss is known.
    unknown = max(0.0, min(plan.timeline[0].at, done) - begin)
    return unknown + max(anew) - done + plan.timings.get("proof", 0.0)


def _ends(trace: DemoTrace, plan: MigrationPlan) -> list[float]:
    """When each survivor had finished the current step."""
    ends = [line["computed"] for line in _broken(trace, plan)]
    settled = next(m.at for m in reversed(plan.timeline) if m.phase is Phase.SYNC)
    for rank in _stayers(trace, plan):
        old = [line for line in trace.of_rank(rank) if line["epoch"] < plan.new.epoch]
        # An undecided survivor has waited before it committed.
        ends += [line["at" if line["at"] <= settled else "computed"] for line in old[-1:]]
    return ends


def _broken(trace: DemoTrace, plan: MigrationPlan) -> list[Line]:
    """Steps spoilt by the fault that ``plan`` repaired; some workers give up in its new epoch."""
    if plan.resume is None:
        first, last = (plan.old.epoch, 0), (plan.new.epoch, -1)
    else:
        first, last = (plan.old.epoch, plan.resume - 1), (plan.new.epoch, plan.resume)
    return [line for line in trace.undone if first <= (line["epoch"], line["undone"]) <= last]


def _repeated(trace: DemoTrace, plan: MigrationPlan) -> int:
    """The largest number of steps that a rank had to repeat."""
    counts: dict[int, set[int]] = defaultdict(set)
    for line in _broken(trace, plan):
        counts[line["rank"]].add(line["undone"])
    back = 0 if plan.rollback is None else plan.rollback.repeats
    return back + max((len(steps) for steps in counts.values()), default=0)

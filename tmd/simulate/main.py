"""``tmd simulate``: ways to go on after a loss, compared on one trace of failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tmd.cli import output
from tmd.cli.common import ConfigOption, JsonOption
from tmd.core.values.errors import ConfigError
from tmd.core.values.snapshots import EVERY
from tmd.simulate import compare, options, tables
from tmd.simulate.failures import Habits
from tmd.simulate.options import Given, Question
from tmd.simulate.values import Fault, Kind, Outcome, Way

ALL = "restart,elastic,warm,hot"


def simulate(
    hosts: options.Hosts = 128,
    standbys: Annotated[int, typer.Option(min=0, help="Compare 0 to so many standbys.")] = 2,
    ways: Annotated[str, typer.Option(help="Ways to compare, with commas.")] = ALL,
    replica_hosts: options.ReplicaHosts = 1,
    days: options.Days = 30.0,
    failures: options.Failures = "llama3",
    trace: options.Trace = None,
    mtbf_h: options.Mtbf = None,
    repair_h: options.Repair = 24.0,
    notice_h: options.Notice = 1.0,
    announced: options.Announced = 0.0,
    costs: options.CostSet = "bench",
    cost: options.Cost = None,
    checkpoint_s: options.Checkpoint = None,
    snapshot_steps: Annotated[
        int, typer.Option(min=0, help="Steps between snapshots where a state exists once.")
    ] = EVERY,
    seed: options.Seed = 0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare ways to go on after a loss on the same failures, in virtual time.

    The policies of the configuration and the real planner decide; how long a decision takes to
    carry out is a figure with a source, which is printed. Needs no cluster."""
    kinds = _kinds(ways)
    habits = Habits(repair_h, notice_h, announced, mtbf_h)
    given = Given(
        hosts=hosts,
        replica_hosts=replica_hosts,
        days=days,
        table=failures,
        trace=trace,
        habits=habits,
        costs=costs,
        cost=tuple(cost or ()),
        checkpoint_s=checkpoint_s,
        snapshot_steps=snapshot_steps,
        standbys=standbys,
        config=config,
    )
    asked = options.question(given)
    faults = asked.trace(seed)
    found = _played(asked, faults, compare.ways(kinds, standbys))
    if as_json:
        output.print_json(facts(asked, faults, found, seed))
        return
    _print(asked, faults, found)


def _kinds(text: str) -> list[Kind]:
    known = list(Kind)
    found = []
    for name in text.split(","):
        if name.strip() not in known:
            raise ConfigError(f"--ways: there is no way '{name}'; there are {', '.join(known)}")
        found.append(Kind(name.strip()))
    return found


def _played(asked: Question, faults: Sequence[Fault], ways: Sequence[Way]) -> list[Outcome]:
    """The outcomes, with a progress bar on stderr."""
    console = output.console(stderr=True)
    hidden = not console.is_terminal
    done = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        TextColumn("{task.description}"), *done, console=console, transient=True, disable=hidden
    ) as progress:
        task = progress.add_task("simulating", total=len(ways))
        found = []
        for one in compare.outcomes(asked.study, faults, ways):
            found.append(one)
            progress.advance(task)
    return found


def facts(
    asked: Question, faults: Sequence[Fault], found: Sequence[Outcome], seed: int
) -> dict[str, object]:
    """All that was found, for programs."""
    return {
        "job": asked.study.job,
        "failures": {"source": asked.failures, "seed": seed, "faults": len(faults)},
        "habits": asked.given.habits,
        "costs": asked.sourced.costs,
        "sources": asked.sourced.sources,
        "outcomes": [{**msgspec.to_builtins(one), "goodput": one.goodput} for one in found],
    }


def _print(asked: Question, faults: Sequence[Fault], found: Sequence[Outcome]) -> None:
    job = asked.study.job
    struck = options.struck(tuple(faults), job)
    output.say(
        f"{job.hosts} hosts in {job.replicas} replicas, {job.hours:g} h, {struck} failures of the "
        f"job and its hosts: {asked.failures}"
    )
    output.draw(tables.outcomes(found, job.hosts))
    output.say("Costs in seconds:")
    for line in tables.sources(asked.sourced):
        output.say(line)

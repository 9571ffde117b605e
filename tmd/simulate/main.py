"""``tmd simulate``: methods of going on after a loss, compared on one trace of failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tmd.cli import output
from tmd.cli.common import ConfigOption, JsonOption
from tmd.core.values.errors import ConfigError
from tmd.core.values.snapshots import EVERY
from tmd.simulate import chart, compare, options, tables
from tmd.simulate.advice import mean
from tmd.simulate.options import Source
from tmd.simulate.playing import played
from tmd.simulate.values import Fault, Job, RecoveryMethod, RecoverySetup

ALL = "restart,elastic,warm,hot"


def simulate(
    hosts: options.HostsOption = 128,
    standbys: Annotated[int, typer.Option(min=0, help="Compare 0 up to this many standbys.")] = 2,
    methods: Annotated[str, typer.Option(help="Methods to compare, with commas.")] = ALL,
    replica_hosts: options.ReplicaHostsOption = 1,
    days: options.DaysOption = 30.0,
    failures: options.FailuresOption = "llama3",
    trace: options.TraceOption = None,
    mtbf_h: options.MtbfOption = None,
    repair_h: options.RepairOption = 24.0,
    notice_h: options.NoticeOption = 1.0,
    announced: options.AnnouncedOption = 0.0,
    costs: options.CostSetOption = "bench",
    cost: options.CostOption = None,
    checkpoint_s: options.CheckpointOption = None,
    snapshot_steps: Annotated[
        int, typer.Option(min=0, help="Steps between snapshots where a state exists once.")
    ] = EVERY,
    runs: Annotated[int, typer.Option(min=1, help="Traces that are drawn and averaged.")] = 1,
    seed: options.SeedOption = 0,
    chart_file: Annotated[
        Path | None, typer.Option("--chart", help="Draw the lost hours by cause: FILE.svg.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods of going on after a loss on the same failures, in virtual time.

    The policies of the configuration and the real planner decide. The time that each decision
    takes is an input; the output lists these times with their sources. Needs no cluster."""
    if chart_file is not None:
        chart.check(chart_file)
    job = options.job_of(hosts, replica_hosts, days)
    source = Source(failures, trace, options.assumptions_of(repair_h, notice_h, announced, mtbf_h))
    sourced = options.costs_of(costs, cost)
    rules = options.rules(config, source)
    study = compare.Study(job, sourced.costs, rules, options.pace(checkpoint_s), snapshot_steps)
    compared = _compared(methods, standbys)
    traces = source.traces(job, standbys, seed, runs)
    found = [mean(outcomes) for outcomes in played(study, traces, compared).values()]
    if as_json:
        asked = options.facts(study, source, sourced, seed)
        shown = [{**msgspec.to_builtins(one), "goodput": one.goodput} for one in found]
        output.print_json({**asked, "traces": len(traces), "outcomes": shown})
    else:
        output.say(_heading(job, source, traces))
        output.draw(tables.outcomes(found, job.hosts))
        tables.say_costs(sourced)
    if chart_file is not None:
        chart.write(chart_file, found)


def _compared(text: str, standbys: int) -> list[RecoverySetup]:
    known = list(RecoveryMethod)
    methods = [name.strip() for name in text.split(",")]
    if unknown := [name for name in methods if name not in known]:
        raise ConfigError(f"--methods: no method '{unknown[0]}'; there are {', '.join(known)}")
    found = compare.setups([RecoveryMethod(name) for name in dict.fromkeys(methods)], standbys)
    if not found:
        raise ConfigError(f"--standbys {standbys}: a job with hot standbys has at least 1")
    return found


def _heading(job: Job, source: Source, traces: Sequence[Sequence[Fault]]) -> str:
    struck = sum(compare.interruptions(trace, job) for trace in traces) / len(traces)
    replicas = "1 replica" if job.state_exists_once else f"{job.replicas} replicas"
    return (
        f"{job.hosts} hosts in {replicas}, {job.hours:g} h, {struck:.1f} failures of the job and "
        f"its hosts: {source.name}"
    )

"""``tmd advise``: how many standbys, of which kind, and how often to save, for a price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tmd.cli import output
from tmd.cli.common import ConfigOption, JsonOption
from tmd.core.values.errors import ConfigError
from tmd.simulate import compare, options, tables
from tmd.simulate.advice import Advice, Price, PricedSetup, recommended, sentences, snapshot_steps
from tmd.simulate.options import Source
from tmd.simulate.playing import played
from tmd.simulate.values import Fault, Job, RecoveryMethod

if TYPE_CHECKING:
    from rich.table import Table


def advise(
    hosts: options.HostsOption = 128,
    price: Annotated[
        float, typer.Option(help="Price of a GPU for an hour, in any currency.")
    ] = 2.0,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a host.")] = 8,
    standbys: Annotated[int, typer.Option(min=1, help="Most standbys to try.")] = 4,
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
    runs: Annotated[
        int, typer.Option(min=1, help="Traces that are drawn and averaged; one with --trace.")
    ] = 10,
    seed: options.SeedOption = 0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recommend how many standbys to keep, warm or hot, and how often to save the state.

    The standbys with the cheapest hour of undisturbed training win; the best restart and the best
    elastic job are named for comparison. 'tmd simulate' says what is modelled."""
    if not 0 < price < float("inf"):
        raise ConfigError(f"--price {price:g}: give a price above 0")
    job = options.job_of(hosts, replica_hosts, days)
    source = Source(failures, trace, options.assumptions_of(repair_h, notice_h, announced, mtbf_h))
    sourced = options.costs_of(costs, cost)
    traces = source.traces(job, standbys, seed, runs)
    steps = snapshot_steps(job, sourced.costs, _loss_every_s(job, traces))
    rules = options.rules(config, source)
    study = compare.Study(job, sourced.costs, rules, options.pace(checkpoint_s), steps)
    found = played(study, traces, compare.setups(list(RecoveryMethod), standbys))
    advice = recommended(found, job, Price(price, gpus), steps)
    reasons = list(sentences(advice, job, sourced.costs))
    if as_json:
        shown = {"traces": len(traces), "reasons": reasons, "advice": advice}
        output.print_json({**options.facts(study, source, sourced, seed), **shown})
        return
    for sentence in reasons:
        output.say(sentence)
    output.draw(_table(advice, job.hosts))
    output.say(f"Number of traces: {len(traces)}; failures: {source.name}.")
    tables.say_costs(sourced)


def _loss_every_s(job: Job, traces: Sequence[Sequence[Fault]]) -> float:
    """Mean time between two losses of any rank of the job that nothing warns of, which alone make
    it go back to a snapshot; its whole length if there is less than one."""
    losses = sum(compare.losses(trace, job) for trace in traces) / len(traces)
    return job.whole_s / max(1.0, losses)


def _table(advice: Advice, hosts: int) -> Table:
    head = (
        "setup",
        "goodput",
        "per host paid",
        "price of an hour",
        "hours gained",
        "worth",
        "costs",
    )
    return output.table(
        head, (_row(o, hosts) for o in advice.setups), title="Standbys, one more at a time"
    )


def _row(option: PricedSetup, hosts: int) -> tuple[str, ...]:
    shown = (
        option.setup.name,
        f"{option.outcome.goodput:.2%}",
        f"{tables.per_host(option.outcome, hosts):.2%}",
        f"{option.useful_hour:,.2f}",
    )
    if not option.setup.standbys:
        return (*shown, "-", "-", "-")
    return (*shown, f"{option.gained_h:.2f}", f"{option.worth:,.0f}", f"{option.price:,.0f}")

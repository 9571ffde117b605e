"""Options that simulate and advise share, and what is read from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from tmd.config import load
from tmd.core.values.errors import ConfigError
from tmd.simulate import costs, failures, trace_file
from tmd.simulate.compare import Study, rules_of
from tmd.simulate.costs import Sourced
from tmd.simulate.failures import Habits
from tmd.simulate.values import Fault, Fells, Job

DAY_H = 24.0

Hosts = Annotated[int, typer.Option(min=2, help="Hosts that train, without standbys.")]
ReplicaHosts = Annotated[
    int,
    typer.Option(
        min=1,
        help="Hosts of one model replica. All hosts of the job: each state exists once.",
    ),
]
Days = Annotated[float, typer.Option(min=0.01, help="Length of the simulated time.")]
Failures = Annotated[
    str, typer.Option(help="Published table of failures to draw a trace from: llama3 or rsc.")
]
Trace = Annotated[
    Path | None,
    typer.Option(help="A trace of your own instead: CSV with a header, or JSON lines."),
]
Mtbf = Annotated[
    float | None,
    typer.Option(
        "--mtbf-h", help="Mean hours between failures of the whole job, instead of the table's."
    ),
]
Repair = Annotated[
    float, typer.Option("--repair-h", min=0.0, help="Mean hours until a lost host is back.")
]
Notice = Annotated[
    float, typer.Option("--notice-h", min=0.0, help="Hours from a warning to the loss of a host.")
]
Announced = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Share of host failures that a detector finds before."),
]
CostSet = Annotated[
    str, typer.Option(help="Costs of events: bench, published, or a TOML file of your own.")
]
Cost = Annotated[
    list[str] | None,
    typer.Option(help="One cost, as step_s=4.5; may be given several times."),
]
Checkpoint = Annotated[
    float | None,
    typer.Option(
        "--checkpoint-s",
        min=0.0,
        help="Seconds of training between checkpoints. [default: what loses least, for each way]",
    ),
]
Seed = Annotated[int, typer.Option(help="The same seed, the same result, on any machine.")]


class Given(Struct, frozen=True):
    """What was asked for."""

    hosts: int
    replica_hosts: int
    days: float
    table: str
    trace: Path | None
    habits: Habits
    costs: str
    cost: tuple[str, ...]
    checkpoint_s: float | None
    snapshot_steps: int
    standbys: int
    config: Path | None


class Question(Struct, frozen=True):
    """What is studied, with the sources of its figures."""

    study: Study
    sourced: Sourced
    failures: str
    """The source of the trace."""
    given: Given

    def trace(self, seed: int) -> tuple[Fault, ...]:
        """The trace of this seed; of a file always the same.

        Raises:
            ConfigError: the file is wrong.
        """
        given, job = self.given, self.study.job
        if given.trace is not None:
            return trace_file.read(given.trace, job.hosts, given.standbys, given.habits)
        table = failures.table_named(given.table)
        return failures.drawn(table, job, given.standbys, given.habits, seed)


def question(given: Given) -> Question:
    """The study that ``given`` asks for.

    Raises:
        ConfigError: names the option, what is wrong and the remedy.
    """
    if given.hosts % given.replica_hosts:
        raise ConfigError(
            f"--replica-hosts {given.replica_hosts}: {given.hosts} hosts cannot be divided into "
            "replicas of this size"
        )
    if given.habits.mtbf_h is not None and not 0 < given.habits.mtbf_h < float("inf"):
        raise ConfigError(f"--mtbf-h {given.habits.mtbf_h:g}: give hours above 0")
    job = Job(given.hosts, given.replica_hosts, given.days * DAY_H)
    sourced = _costs(given)
    table = failures.table_named(given.table)
    announced = given.habits.announced > 0 or given.trace is not None
    study = Study(
        job=job,
        costs=sourced.costs,
        rules=rules_of(load(given.config), announced=announced),
        checkpoint_every_s=given.checkpoint_s,
        snapshot_steps=given.snapshot_steps,
    )
    source = table.source if given.trace is None else str(given.trace)
    return Question(study, sourced, source, given)


def _costs(given: Given) -> Sourced:
    known = costs.shipped()
    base = known.get(given.costs) or costs.read(Path(given.costs))
    values: dict[str, float] = {}
    for each in given.cost:
        name, _, text = each.partition("=")
        try:
            values[name.strip()] = float(text)
        except ValueError:
            raise ConfigError(f"--cost {each}: write it as step_s=4.5") from None
    return costs.changed(base, values, "--cost")


def struck(trace: tuple[Fault, ...], job: Job) -> int:
    """Faults of ``trace`` that concern the job's own hosts, or all of it."""
    return sum(f.fells is Fells.JOB or f.place < job.hosts for f in trace)

"""Options that simulate and advise share, and what is read from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from tmd.cli import output
from tmd.config import load
from tmd.core.values.errors import ConfigError
from tmd.simulate import costs, failures, trace_file
from tmd.simulate.cluster import OperatorRules
from tmd.simulate.compare import Study, rules_of
from tmd.simulate.costs import Sourced
from tmd.simulate.failures import DAY_H, FaultAssumptions
from tmd.simulate.values import Fault, Job

HostsOption = Annotated[int, typer.Option(min=2, help="Hosts that train, without standbys.")]
ReplicaHostsOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Hosts of one model replica. All hosts of the job: each state exists once.",
    ),
]
DaysOption = Annotated[float, typer.Option(min=0.01, help="Length of the simulated time.")]
FailuresOption = Annotated[
    str,
    typer.Option(help="Published table of failures to draw a trace from: llama3 or trainmover."),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(help="A trace of your own instead: CSV with a header, or JSON lines."),
]
MtbfOption = Annotated[
    float | None,
    typer.Option(
        "--mtbf-h", help="Mean hours between failures of the whole job, instead of the table's."
    ),
]
RepairOption = Annotated[
    float, typer.Option("--repair-h", min=0.0, help="Mean hours until a lost host is back.")
]
NoticeOption = Annotated[
    float, typer.Option("--notice-h", min=0.0, help="Hours from a warning to the loss of a host.")
]
AnnouncedOption = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Share of host failures that a detector predicts."),
]
CostSetOption = Annotated[
    str, typer.Option(help="Costs of events: bench, published, or a TOML file of your own.")
]
CostOption = Annotated[
    list[str] | None,
    typer.Option(help="One cost, as step_s=4.5; may be given several times."),
]
CheckpointOption = Annotated[
    float | None,
    typer.Option(
        "--checkpoint-s",
        min=0.0,
        help="Seconds of training between checkpoints, 0 for none. [default: what loses least, for "
        "each setup]",
    ),
]
SeedOption = Annotated[
    int, typer.Option(help="Seed of the random numbers: the result is the same on any machine.")
]


class Source(Struct, frozen=True):
    """Where failures come from."""

    table: str
    """Name of a published table."""
    file: Path | None
    """A file with the user's own faults, in place of the table."""
    assumptions: FaultAssumptions

    @property
    def name(self) -> str:
        """The source of the failures, as shown in the output."""
        return failures.table_named(self.table).source if self.file is None else str(self.file)

    def traces(self, job: Job, standbys: int, seed: int, runs: int) -> list[tuple[Fault, ...]]:
        """One trace for each run; of a file only one.

        Raises:
            ConfigError: there is no such table, or the file is wrong.
        """
        if self.file is not None:
            found = trace_file.read(self.file, job.hosts, standbys, self.assumptions)
            return [_within(found, job, self.file)]
        table = failures.table_named(self.table)
        return [
            failures.drawn(table, job, standbys, self.assumptions, each)
            for each in range(seed, seed + runs)
        ]


def _within(found: tuple[Fault, ...], job: Job, file: Path) -> tuple[Fault, ...]:
    """The faults before the end of ``job``; a warning counts the others, which never strike."""
    kept = tuple(fault for fault in found if fault.at_s < job.whole_s)
    if len(kept) < len(found):
        output.say(
            f"tmd: warning: {file}: {len(found) - len(kept)} of {len(found)} faults are at or "
            f"beyond the end of --days {job.hours / DAY_H:g} and are left out",
            err=True,
        )
    return kept


def checked(option: str, value: float) -> float:
    """``value``, which the user gave as ``option``.

    Raises:
        ConfigError: it is infinite or not a number.
    """
    if not math.isfinite(value):
        raise ConfigError(f"{option} {value:g}: give a finite number")
    return value


def job_of(hosts: int, replica_hosts: int, days: float) -> Job:
    """The job that the options describe.

    Raises:
        ConfigError: hosts cannot be divided into replicas, or the time has no end.
    """
    if hosts % replica_hosts:
        raise ConfigError(
            f"--replica-hosts {replica_hosts}: {hosts} hosts cannot be divided into replicas of "
            "this size"
        )
    return Job(hosts, replica_hosts, checked("--days", days) * DAY_H)


def assumptions_of(
    repair_h: float, notice_h: float, announced: float, mtbf_h: float | None
) -> FaultAssumptions:
    """What the options say of failures.

    Raises:
        ConfigError: one is not a finite number, or the mean time between failures is none.
    """
    if mtbf_h is not None and checked("--mtbf-h", mtbf_h) <= 0:
        raise ConfigError(f"--mtbf-h {mtbf_h:g}: give hours above 0")
    return FaultAssumptions(
        checked("--repair-h", repair_h),
        checked("--notice-h", notice_h),
        checked("--announced", announced),
        mtbf_h,
    )


def pace(seconds: float | None) -> float | None:
    """The time between checkpoints; ``None`` for what loses least.

    Raises:
        ConfigError: it is not a finite number.
    """
    return None if seconds is None else checked("--checkpoint-s", seconds)


def costs_of(name: str, each: Sequence[str] | None) -> Sourced:
    """A set of costs, with some of ``each`` instead.

    Raises:
        ConfigError: names the file or the option, what is wrong and the remedy.
    """
    sets = costs.shipped()
    if name not in sets and "." not in name and not Path(name).exists():
        known = ", ".join(sets)
        raise ConfigError(f"--costs {name}: there is no such file, nor such a set: {known}")
    base = sets.get(name) or costs.read(Path(name))
    values: dict[str, float] = {}
    for text in each or ():
        key, _, number = text.partition("=")
        try:
            values[key.strip()] = float(number)
        except ValueError:
            raise ConfigError(f"--cost {text}: write it as step_s=4.5") from None
    return costs.changed(base, values, "--cost")


def rules(config: Path | None, source: Source) -> OperatorRules:
    """Policies and limits of the configuration.

    Raises:
        ConfigError: the configuration is wrong.
    """
    announced = source.assumptions.announced > 0 or source.file is not None
    return rules_of(load(config), announced=announced)


def facts(study: Study, source: Source, sourced: Sourced, seed: int) -> dict[str, object]:
    """What was asked, for programs."""
    return {
        "job": study.job,
        "failures": {"source": source.name, "seed": seed},
        "assumptions": source.assumptions,
        "costs": sourced.costs,
        "sources": sourced.sources,
    }

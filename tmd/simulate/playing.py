"""Plays traces against setups, with a progress bar."""

from __future__ import annotations

from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tmd.cli import output
from tmd.simulate.compare import Study, outcome
from tmd.simulate.values import Fault, Outcome, RecoverySetup


def played(
    study: Study, traces: Sequence[Sequence[Fault]], setups: Sequence[RecoverySetup]
) -> dict[RecoverySetup, list[Outcome]]:
    """The outcomes of each setup, one for each trace."""
    console = output.console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    found: dict[RecoverySetup, list[Outcome]] = {setup: [] for setup in setups}
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("simulating", total=len(traces) * len(setups))
        for trace in traces:
            for setup in setups:
                found[setup].append(outcome(study, trace, setup))
                progress.advance(task)
    return found

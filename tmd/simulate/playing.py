"""Plays traces against ways, with a progress bar."""

from __future__ import annotations

from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tmd.cli import output
from tmd.simulate.compare import Study, outcome
from tmd.simulate.values import Fault, Outcome, Way


def played(
    study: Study, traces: Sequence[Sequence[Fault]], ways: Sequence[Way]
) -> dict[Way, list[Outcome]]:
    """The outcomes of each way, one for each trace."""
    console = output.console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    found: dict[Way, list[Outcome]] = {way: [] for way in ways}
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("simulating", total=len(traces) * len(ways))
        for trace in traces:
            for way in ways:
                found[way].append(outcome(study, trace, way))
                progress.advance(task)
    return found

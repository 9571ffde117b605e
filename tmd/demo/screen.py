"""The live display of the demo, and its final report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tmd.core.values.model import Activity, Alert, ClusterView, HostStatus
from tmd.demo.report import PARTS, DemoEvent

COLOURS = {
    Activity.TRAINING: "green",
    Activity.STANDBY: "cyan",
    Activity.STARTING: "dim",
    Activity.PREPARED: "yellow",
    Activity.STUCK: "red",
    Activity.SYNCED: "yellow",
    Activity.LEFT: "magenta",
}


class DemoScreen:
    """A live picture on a terminal; elsewhere a plain line per change."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._started = time.monotonic()
        self._sentence = ""
        self._events: list[Text] = []
        self._phase = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def say(self, sentence: str) -> None:
        """Show the next chapter of the story."""
        self._sentence = sentence
        self._note(sentence, "bold")

    def show(self, view: ClusterView, leader: str) -> None:
        """Show a changed view of the cluster."""
        self._follow(view)
        if self._console.is_terminal:
            self._live.update(self._picture(view, leader))

    def _follow(self, view: ClusterView) -> None:
        plan = view.jobs[0].plan if view.jobs else None
        phase = f"{plan.id} {plan.kind} {plan.phase}" if plan else ""
        if plan and phase != self._phase:
            moves = ", ".join(
                f"rank {m.rank}: {m.leaver.host} -> {m.joiner.host if m.joiner else '?'}"
                for m in plan.moves
            )
            self._note(f"  {plan.id}  {plan.kind}  {plan.phase}  {moves}", "yellow")
        self._phase = phase

    def _note(self, text: str, style: str) -> None:
        line = Text(f"{time.monotonic() - self._started:6.1f} s  {text}", style=style)
        self._events.append(line)
        if not self._console.is_terminal:
            self._console.print(line)

    def _picture(self, view: ClusterView, leader: str) -> RenderableType:
        table = Table("host", "", "worker", "rank", "epoch", "step", "loss", "alerts", expand=True)
        for host in view.hosts:
            _add_host(table, host, host.host == leader)
        steps = [w.step for h in view.hosts for w in h.workers if w.activity is Activity.TRAINING]
        done = min(steps, default=0)
        bar = ProgressBar(total=self._steps, completed=done)
        return Group(
            Text(f"{self._sentence}  step {done}/{self._steps}", style="bold"),
            bar,
            table,
            *self._events[-8:],
        )


def _add_host(table: Table, host: HostStatus, leads: bool) -> None:
    alerts = ", ".join(_brief(a) for a in host.alerts)
    mark = "leader" if leads else ""
    if not host.workers:
        table.add_row(host.host, mark, "-", "", "", "", "", Text(alerts, style="red"))
    for worker in host.workers:
        loss = "" if worker.loss is None else f"{worker.loss:.4f}"
        rank = "" if worker.rank is None else str(worker.rank)
        doing = Text(worker.activity, style=COLOURS.get(worker.activity, ""))
        numbers = (rank, str(worker.epoch), str(worker.step), loss)
        table.add_row(host.host, mark, doing, *numbers, Text(alerts, style="red"))


def _brief(alert: Alert) -> str:
    return f"{alert.code} ({alert.message})"


def print_report(console: Console, facts: dict[str, object], events: list[DemoEvent]) -> None:
    """Print the final report."""
    table = Table(title="What each event cost", title_justify="left")
    table.add_column("")
    for event in events:
        table.add_column(f"{event.kind} ({event.cause})", justify="right")
    for name, values in _rows(events):
        table.add_row(name, *values)
    console.print(table)
    console.print(
        "pause: last step of the old membership to the first of the new; downtime: kill -9 to the "
        "first new step; both on the slowest stayer, minus one median step. The preparation of a "
        "planned move runs beside training and does not count as pause."
    )
    same = facts["losses_identical"]
    console.print(
        f"median step {facts['median_step_s']:.3f} s\nlosses identical to an undisturbed run: "
        f"[bold {'green' if same else 'red'}]{'yes' if same else 'NO'}[/], bit for bit, "
        f"{facts['compared_steps']} steps of every rank"
    )
    if facts["difference"]:
        console.print(str(facts["difference"]))
    if facts["unwritten_lines"]:
        console.print("(the killed worker had not yet written its last step)")


def _rows(events: list[DemoEvent]) -> Iterator[tuple[str, list[str]]]:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f} s"

    yield "rank", [str(e.rank) for e in events]
    yield "from, to", [f"{e.from_host}, {e.to_host}" for e in events]
    yield "pause", [seconds(e.pause_s) for e in events]
    yield "downtime", [seconds(e.downtime_s) for e in events]
    for part in PARTS:
        yield f"  {part}", [seconds(e.split[part]) for e in events]
    yield "steps run again", [str(e.repeated_steps) for e in events]
    yield (
        "new connections of each stayer",
        [" ".join(map(str, e.new_connections_per_stayer.values())) for e in events],
    )
    yield (
        "growth of a stayer's peak memory",
        [f"{e.stayer_rss_growth_bytes / 2**20:.1f} MiB" for e in events],
    )

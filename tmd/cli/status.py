"""``tmd status``: the cluster at a glance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tmd.cli.common import ConfigOption, JsonOption, with_store
from tmd.cli.output import add, cell, console, draw, print_json, table
from tmd.core.values.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from tmd.config import Settings
    from tmd.core.values.model import (
        ClusterView,
        Exit,
        JobRecord,
        MigrationPlan,
        Rehearsal,
        ShadowStatus,
        WorkerStatus,
    )
    from tmd.core.values.shadows import Verdicts
    from tmd.daemon.store import RedisStore

HISTORY_SHOWN = 5
WATCH_S = 0.5


def status(
    config: ConfigOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh continuously.")] = False,
) -> None:
    """Show hosts, ranks, alerts and migrations."""
    if watch:
        _check_terminal(as_json)

    async def show(store: RedisStore, settings: Settings) -> None:
        if as_json:
            from tmd.daemon.bus import state_of

            print_json(await state_of(store))
        elif watch:
            await _watch(store, settings.cluster.name)
        else:
            view, leader = await store.snapshot(), await store.leader()
            draw(render(view, settings.cluster.name, leader))

    with_store(config, show)


def _check_terminal(as_json: bool) -> None:
    """Raises ConfigError: Rich would draw nothing."""
    terminal = console()
    if as_json or not terminal.is_terminal or terminal.is_dumb_terminal:
        raise ConfigError("--watch needs a terminal, and excludes --json: run 'tmd status' again")


async def _watch(store: RedisStore, cluster: str) -> None:
    from rich.live import Live

    from tmd.core.values.errors import StoreUnavailable

    with Live(console=console(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown = render(await store.snapshot(), cluster, await store.leader())
                live.update(shown, refresh=True)
            except StoreUnavailable as error:
                live.update(cell(f"{error}; trying again"), refresh=True)
            await asyncio.sleep(WATCH_S)


# --- rendering ------------------------------------------------------------------------------------


def render(view: ClusterView, cluster: str, leader: str) -> Group:
    """The view as tables for a terminal."""
    from rich.console import Group

    from tmd.core.values.view_checks import too_new

    led = f"led by {leader.partition('#')[0]}" if leader else "no leader"
    paused = "   PAUSED: no new migrations" if view.paused else ""
    parts: list[RenderableType] = [
        cell(f"cluster {cluster}   {led}{paused}", "bold"),
        _hosts(view),
    ]
    if view.breaker.open:
        words = f"CIRCUIT BREAKER OPEN: {view.breaker.reason}; 'tmd resume' closes it"
        parts.append(cell(words, "bold red"))
    parts += [cell(too_new(job), "bold red") for job in view.unread_jobs]
    for record in view.jobs:
        parts += _job(view, record)
    alerts = _alerts(view)
    return Group(*parts, *([alerts] if alerts.row_count else []))


def _hosts(view: ClusterView) -> Table:
    from tmd.core.values.view_checks import drain_roles, jobs_by_host

    shown = table(("host", "role", "workers", "alerts", "reported"), title="hosts")
    roles = drain_roles(view)
    for host in view.hosts:
        role = roles.get(host.host, "standby" if host.standby else "active")
        reported = f"{max(0.0, time.time() - host.at):.1f} s ago"
        add(shown, host.host, role, str(len(host.workers)), str(len(host.alerts)), reported)
    known = {h.host for h in view.hosts}
    for name in sorted({*jobs_by_host(view), *roles, *view.unread} - known):
        role = "another version" if name in view.unread else "silent"
        add(shown, name, role, "-", "-", "-", style="red")
    return shown


def _job(view: ClusterView, record: JobRecord) -> Iterator[RenderableType]:
    from tmd.core.values.view_checks import ENDED

    statuses = view.workers(record.job).values()
    if record.state in ENDED and not statuses:
        yield cell(f"job {record.job}: {record.state.value}{_since(record.ended_at)}", "bold")
    else:
        yield _workers(view, record)
        yield from _checkpoints(statuses)
        yield from _kept(statuses)
    if record.detail:
        yield cell(f"  {record.detail}")
    yield from _protection(view, record)
    plans = list(record.history[-HISTORY_SHOWN:])
    if record.plan is not None and record.plan.id not in {plan.id for plan in plans}:
        plans.append(record.plan)
    if plans:
        yield _plans(plans)


def _since(ended_at: float) -> str:
    if not ended_at:
        return ""
    hours = max(0.0, time.time() - ended_at) / 3600
    return f" {hours:.0f} h ago" if hours >= 1 else f" {60 * hours:.0f} min ago"


def _workers(view: ClusterView, record: JobRecord) -> Table:
    shown = table(
        ("rank", "host", "worker", "activity", "step", "loss", "s/step", ""),
        title=f"job {record.job}: {record.state.value}, epoch {record.membership.epoch}",
    )
    workers, exits = dict(view.workers(record.job)), view.exits(record.job)
    for rank, member in enumerate(record.membership.members):
        known = view.workers(record.job).get(member.worker)
        workers.pop(member.worker, None)
        ended = exits.get(member.worker)
        silent = _how_it_ended(ended) if ended else "no heartbeat"
        cells = _cells(known, silent)
        cells[-1] = record.membership.adopter_of(rank) or cells[-1]
        add(shown, str(rank), member.host, member.worker, *cells)
    for host in view.hosts:
        for worker in host.workers:
            if worker.worker in workers:
                add(shown, "-", host.host, worker.worker, *_cells(worker, ""))
    return shown


def _checkpoints(statuses: Collection[WorkerStatus]) -> Iterator[RenderableType]:
    from tmd.core.values.checkpoints import newest

    saved = newest(w.saved for w in statuses)
    if saved is not None:
        yield cell(
            f"  checkpoint of step {saved.step}, {max(0.0, time.time() - saved.at):.0f} s ago"
        )
    missed = [w.missed for w in statuses if w.missed]
    for step, reason in sorted({(m.step, m.reason) for m in missed}):
        yield cell(f"  no checkpoint of step {step}: {reason}")


def _kept(statuses: Collection[WorkerStatus]) -> Iterator[RenderableType]:
    """Memory that workers spend to go on with a step when a hot standby takes a rank."""
    if most := max((w.kept_bytes for w in statuses), default=0):
        up = -(-most // 2**20)
        yield cell(f"  keeps up to {up} MiB on each worker, to finish a step after a loss")


def _protection(view: ClusterView, record: JobRecord) -> Iterator[RenderableType]:
    """Whether a standby is ready to take over a rank after the next loss."""
    from tmd.core.planning.adoption import shrunk
    from tmd.core.planning.readiness import unprotected
    from tmd.core.values.model import JobState

    runs = record.state is JobState.RUNNING
    if why := shrunk(record):
        yield cell(f"  SHRUNK: {why}", "bold red")
    for worker in view.workers(record.job).values():
        if worker.unfit and worker.rank is None:
            yield cell(f"  {worker.worker} is unfit: {worker.unfit}", "red")
        elif runs and worker.rank is None and worker.world_size != record.world_size:
            why = f"it was launched for {worker.world_size} ranks, the job has {record.world_size}"
            yield cell(f"  {worker.worker} is unfit: {why}", "red")
    gap = unprotected(view, record)
    if gap is not None:
        yield cell(f"  NO STANDBY: {gap.sentence}", "bold red")


def _how_it_ended(ended: Exit) -> str:
    return "ending" if ended.code is None else f"ended ({ended.code})"


def _cells(worker: WorkerStatus | None, silent: str) -> list[str]:
    if worker is None:
        return [silent, "-", "-", "-", ""]
    loss = "-" if worker.loss is None else f"{worker.loss:.4f}"
    pace = f"{worker.step_seconds:.3f}" if worker.step_seconds else "-"
    return [worker.activity.value, str(worker.step), loss, pace, _detail(worker)]


def _detail(worker: WorkerStatus) -> str:
    if worker.shadow is not None:
        return _shadowing(worker.shadow)
    if worker.detail or worker.rank is not None:
        return worker.detail
    return verdicts_of(worker.rehearsed)


def verdicts_of(verdicts: Verdicts) -> str:
    """The results of rehearsals, with the ranks they apply to if they differ."""
    from tmd.core.values.shadows import ranges

    if len(verdicts) == 1:
        return _verdict(verdicts[0])
    return "; ".join(f"ranks {ranges(v.ranks)}: {_verdict(v)}" for v in verdicts)


def _verdict(rehearsal: Rehearsal) -> str:
    if rehearsal.refusal:
        return f"unfit: {rehearsal.refusal}"
    if rehearsal.note:
        return f"not rehearsed: {rehearsal.note}"
    if not rehearsal.seconds:
        return f"held a rank until step {rehearsal.step}"
    return f"rehearsed: same bits at step {rehearsal.step}, in {rehearsal.seconds:.1f} s"


def _shadowing(shadow: ShadowStatus) -> str:
    if shadow.copied < 1:
        return f"rank {shadow.rank}: {shadow.copied:.0%} of the state copied"
    equal = "not yet compared" if shadow.verified is None else f"equal at step {shadow.verified}"
    return f"rank {shadow.rank}: {shadow.lag_s * 1000:.0f} ms behind, {equal}"


def _plans(plans: list[MigrationPlan]) -> Table:
    shown = table(("plan", "kind", "phase", "moves", "seconds", "why"), title="migrations")
    for plan in plans:
        moves = ", ".join(
            f"{m.rank}: {m.leaver.host} -> {plan.taker_of(m) or '?'}" for m in plan.moves
        )
        seconds = f"{plan.timeline[-1].at - plan.timeline[0].at:.2f}" if plan.timeline else "-"
        why = "; ".join(filter(None, (plan.outcome or plan.reason, plan.how)))
        add(shown, plan.id, plan.kind.value, plan.phase.value, moves or "-", seconds, why)
    return shown


def _alerts(view: ClusterView) -> Table:
    shown = table(("host", "severity", "code", "entity", "count", "message"), title="alerts")
    for host in view.hosts:
        for alert in host.alerts:
            add(
                shown,
                *(alert.host, alert.severity.value, alert.code, alert.entity),
                *(str(alert.count), alert.message),
            )
    return shown

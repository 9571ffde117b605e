"""Verbs that change the cluster: drain, undrain, set-healthy, forget, pause, resume."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tmd.cli.common import ConfigOption, say_once, snapshot_when_back, user, with_store
from tmd.cli.output import say
from tmd.core.values.errors import TmdError

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.core.values.model import ClusterView, JobRecord
    from tmd.core.values.requests import DrainRequest
    from tmd.daemon.store import RedisStore

LOOK_S = 0.2
STUCK = 3
"""Exit status: the request is stored, but nothing moves now."""
SETTLE_S = 3.0
"""Grace time in which a standby that has just joined, or that a move refused, may become
available."""
HostArgument = Annotated[str, typer.Argument(help="Name of the host, as in 'tmd status'.")]


def drain(
    host: HostArgument,
    config: ConfigOption = None,
    leave: Annotated[
        bool, typer.Option("--leave", help="Its workers exit afterwards instead of standing by.")
    ] = False,
    soft: Annotated[
        bool, typer.Option("--soft", help="Once empty, the host may take ranks after a loss.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the host holds no rank and gets none.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")
    ] = False,
    absent: Annotated[
        bool,
        typer.Option("--absent", help="HOST may be switched off, so that no daemon reports it."),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, help="With --wait: the longest wait in seconds.")
    ] = 600.0,
) -> None:
    """Move all ranks off HOST while training continues. HOST gets no rank until 'tmd undrain HOST',
    even if no other standby is left after a loss. With --soft it may take ranks after a loss.

    Exit status 3: the drain is requested, but nothing moves now, because the cluster is paused, no
    standby is fit, or the daemon of a host of the job is silent; the reason is printed."""
    from tmd.core.values.requests import DrainRequest
    from tmd.core.values.view_checks import unknown_host

    async def ask(store: RedisStore, settings: Settings) -> None:
        view = await store.snapshot()
        if (unknown := unknown_host(view, host)) and not absent:
            raise TmdError(f"{unknown}; --absent drains a host that is switched off")
        request = DrainRequest(
            host=host, id=uuid.uuid4().hex, leave=leave, soft=soft, by=user(), at=time.time()
        )
        if dry_run:
            return _print_outlook(view, request, settings)
        await store.drain(request)
        say(f"drain of {host} requested")
        if wait:
            await _until_empty(store, request, timeout_s=timeout)
        else:
            await _unless_stuck(store, host)

    with_store(config, ask)


def _print_outlook(view: ClusterView, request: DrainRequest, settings: Settings) -> None:
    from msgspec import structs

    from tmd.cli.policies import lines, outlook

    if why := request.refusal(_standing(view, request.host)):
        raise TmdError(why)
    others = tuple(d for d in view.drains if d.host != request.host)
    for line in lines(outlook(structs.replace(view, drains=(*others, request)), settings)):
        say(line)


def undrain(host: HostArgument, config: ConfigOption = None) -> None:
    """Withdraw the drain of HOST: it may take ranks again."""

    async def ask(store: RedisStore, _: Settings) -> None:
        if not await store.undrain(host):
            raise TmdError(f"{host} has no drain request; 'tmd status' lists the drains")
        say(f"drain of {host} withdrawn")

    with_store(config, ask)


def set_healthy(
    host: HostArgument,
    config: ConfigOption = None,
    code: Annotated[
        str, typer.Option("--code", help="Only findings of this code, as in 'tmd status'.")
    ] = "",
) -> None:
    """Clear the findings of HOST and lift its ban. Requester and time are recorded in 'tmd events'.
    A finding returns only if the fault recurs; that of a worker returns while the worker is still
    silent or hangs. Findings of the leader stay: they are about the cluster."""
    from tmd.core.values.requests import HealthyRequest
    from tmd.core.values.view_checks import unknown_host

    async def ask(store: RedisStore, _: Settings) -> None:
        view = await store.snapshot()
        if unknown := unknown_host(view, host):
            raise TmdError(unknown)
        request = HealthyRequest(
            host=host, id=uuid.uuid4().hex, code=code, by=user(), at=time.time()
        )
        await store.declare_healthy(request)
        say(f"{host} declared healthy" + (f" with regard to {code}" if code else ""))
        status = view.host(host)
        if status is None:
            say(f"{host} has no heartbeat: its daemon gets the request when it is back", err=True)
        elif code and code not in (raised := {alert.code for alert in status.alerts}):
            others = ", ".join(sorted(raised)) or "none"
            say(f"tmd: no finding {code} is raised on {host} now; raised: {others}", err=True)

    with_store(config, ask)


def forget(
    job: Annotated[str, typer.Argument(help="Name of the job, as in 'tmd status'.")],
    config: ConfigOption = None,
) -> None:
    """Give up JOB, which no host runs any more: its name is free for a new run. A job that has
    ended is taken off the list.

    tmd never gives up a silent job by itself, since it may still be training. If it is, its workers
    end when their hosts reach Redis again. Refused while a host reports a worker of JOB."""
    from tmd.core.planning.job_end import given_up
    from tmd.core.values.errors import Conflict
    from tmd.core.values.view_checks import ENDED, too_new

    changed = f"{job} has just changed: check 'tmd status', and try again"

    async def ask(store: RedisStore, _: Settings) -> None:
        view = await store.snapshot()
        if job in view.unread_jobs:
            raise TmdError(too_new(job))
        record = view.record(job)
        if record is None:
            raise TmdError(f"there is no job '{job}'; check 'tmd status'")
        if strange := sorted({m.host for m in record.membership.members} & set(view.unread)):
            raise TmdError(
                f"whether {job} still runs on {strange[0]} is not known: a later version of tmd "
                "runs there; use that version"
            )
        if found := sorted(view.workers(job)):
            raise TmdError(
                f"{job} still has workers, such as {found[0]}: end their launchers first"
            )
        if record.state in ENDED:
            if not await store.unlist_job(record):
                raise TmdError(changed)
            return say(f"{job} is no longer listed")
        try:
            await store.put_job(given_up(record, user()), expected=record.revision)
        except Conflict as error:
            raise TmdError(changed) from error
        silent = sorted({m.host for m in record.membership.members if view.host(m.host) is None})
        say(f"{job} given up" + (f"; silent: {', '.join(silent)}" if silent else ""))

    with_store(config, ask)


def pause(config: ConfigOption = None) -> None:
    """Start no new migrations, not even after a loss; live ones finish."""

    async def ask(store: RedisStore, _: Settings) -> None:
        await store.set_paused(True)
        say("paused: a job that loses a worker waits for 'tmd resume'")

    with_store(config, ask)


def resume(config: ConfigOption = None) -> None:
    """End a pause, and close the circuit breaker."""
    from tmd.daemon.breaker import end_pause

    async def ask(store: RedisStore, settings: Settings) -> None:
        if await end_pause(store, user(), settings.host.name):
            say("circuit breaker closed")
        say("resumed")

    with_store(config, ask)


async def _until_empty(store: RedisStore, request: DrainRequest, *, timeout_s: float) -> None:
    """Return once the host has held no rank for a while, and no plan has given it one. A leader may
    still decide on a view from before the drain, and Redis may have lost a record."""
    from tmd.core.planning.free_hosts import GONE_S, SETTLED_S, is_free
    from tmd.core.values.view_checks import jobs_by_host

    host, printed = request.host, set[str]()
    free, unfit, silent = _HoldTimer(), _HoldTimer(), _HoldTimer()
    holds = False
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                view, now = await snapshot_when_back(store, printed), time.monotonic()
                _refuse_unreadable(view)
                standing = _standing(view, host)
                # Another operator's drain counts as well, unless it is weaker than this one.
                if standing is None or standing.refusal(request):
                    raise TmdError(f"{host} is no longer drained: run 'tmd drain {host}' again")
                for record in jobs_by_host(view).get(host, ()):
                    holds = True
                    _show_progress(record, printed)
                settle_s = SETTLED_S
                if view.host(host) is None:
                    settle_s = GONE_S
                    say_once(
                        f"{host} is silent: it counts as empty after {GONE_S:g} s without a rank",
                        printed,
                    )
                if free.seconds(is_free(view, host), now) >= settle_s:
                    break
                if paused := _paused(view, host):
                    _exit_stuck(host, paused)
                if unfit.seconds(why := _obstacles(view, host), now) >= SETTLE_S:
                    _exit_stuck(host, why)
                # The silent member may turn out to be lost, and a failover then helps.
                if silent.seconds(why := _silent_members(view, host), now) >= GONE_S:
                    _exit_stuck(host, why)
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        known = f"{host} still holds ranks" if holds else f"{host} may still hold or get a rank"
        raise TmdError(
            f"{known} after {timeout_s:g} s; the drain remains requested, "
            "'tmd status' shows what it waits for"
        ) from None
    say(f"{host} holds no ranks")


class _HoldTimer:
    """Measures how long a condition has held without a break."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, holds: object, now: float) -> float:
        """Note whether it ``holds`` now; returns for how long it has."""
        if not holds:
            self._since = None
            return 0.0
        self._since = now if self._since is None else self._since
        return now - self._since


def _refuse_unreadable(view: ClusterView) -> None:
    """Whether a host is empty is not known while some record cannot be read."""
    from tmd.core.values.view_checks import too_new

    if view.unread_jobs:
        raise TmdError(
            f"{too_new(view.unread_jobs[0])}; the drain remains requested, and whether the host "
            "still holds ranks of that job is not known here"
        )


async def _unless_stuck(store: RedisStore, host: str) -> None:
    """Return once a plan is possible; exit with status 3 if none is for ``SETTLE_S``."""
    printed: set[str] = set()
    until = time.monotonic() + SETTLE_S
    try:
        async with asyncio.timeout(2 * SETTLE_S):
            while True:
                view = await snapshot_when_back(store, printed)
                if paused := _paused(view, host):
                    _exit_stuck(host, paused)
                why = _obstacles(view, host) or _silent_members(view, host)
                if not why:
                    return
                if time.monotonic() >= until:
                    _exit_stuck(host, why)
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        say("whether ranks move is not known: check 'tmd status'", err=True)


def _standing(view: ClusterView, host: str) -> DrainRequest | None:
    """The present drain of ``host``."""
    return next((request for request in view.drains if request.host == host), None)


def _paused(view: ClusterView, host: str) -> list[str]:
    """Why a pause keeps ranks on ``host`` where they are; empty if it does not."""
    from tmd.core.planning.planned_moves import is_left
    from tmd.core.values.view_checks import jobs_by_host

    stay = [r for r in jobs_by_host(view).get(host, ()) if not is_left(r, host)]
    if not (view.paused and stay):
        return []
    return ["the cluster is paused: nothing moves until 'tmd resume'"]


def _obstacles(view: ClusterView, host: str) -> list[str]:
    """Why ranks on ``host`` cannot move now, by job."""
    from tmd.core.planning.planned_moves import obstacle
    from tmd.core.values.view_checks import jobs_by_host

    records = jobs_by_host(view).get(host, [])
    return [f"{r.job}: {why}" for r in records if (why := obstacle(r, view, host))]


def _silent_members(view: ClusterView, host: str) -> list[str]:
    """Why ranks on ``host`` wait for a silent member of their job, by job."""
    from tmd.core.planning.migration import PlanFacts
    from tmd.core.planning.planned_moves import silent_member
    from tmd.core.values.view_checks import jobs_by_host

    records = jobs_by_host(view).get(host, [])
    found = [(r.job, silent_member(r, PlanFacts(view, r.job))) for r in records]
    return [f"{job}: {why}" for job, why in found if why]


def _exit_stuck(host: str, why: list[str]) -> NoReturn:
    for line in why:
        say(line, err=True)
    say(
        f"nothing moves now: the drain of {host} remains requested, and begins once it can; "
        f"'tmd undrain {host}' withdraws it",
        err=True,
    )
    raise typer.Exit(STUCK)


def _show_progress(record: JobRecord, printed: set[str]) -> None:
    from tmd.core.planning.migration import is_live

    plan = record.plan
    lines = [record.detail] if record.detail else []
    if plan is not None and is_live(plan):
        lines.append(f"{record.job}: {plan.id} {plan.phase.value}")
    for line in lines:
        say_once(line, printed)

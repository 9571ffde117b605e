"""``tmd standby``: makes the standbys of a host prove that they compute their job's exact bits."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tmd.cli.common import ConfigOption, JsonOption, snapshot_when_back, user, with_store
from tmd.cli.output import say, say_json
from tmd.cli.status import verdicts_of
from tmd.core.values.errors import TmdError

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.core.values.model import ClusterView, WorkerStatus
    from tmd.core.values.requests import RehearsalRequest
    from tmd.daemon.store import RedisStore

LOOK_S = 0.2

standby = typer.Typer(no_args_is_help=True)


@standby.callback()
def group() -> None:
    """The pool of standbys."""
    # Without this callback a group with one verb would become that verb.


@standby.command()
def rehearse(
    host: Annotated[str, typer.Argument(help="Host of the standbys, as in 'tmd status'.")],
    config: ConfigOption = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the verdicts.")] = True,
    timeout: Annotated[float, typer.Option(help="Longest wait in seconds.")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Let each standby on HOST replay a step of one rank of each kind, and compare the bits with
    those of the rank. Training continues. A standby that computes other bits gets no rank. One that
    cannot be built like a rank never gets that rank. A hot standby, which follows a rank already,
    is only reported. Exit status 1 if a standby fails."""
    from tmd.core.values.requests import RehearsalRequest

    async def ask(store: RedisStore, _: Settings) -> None:
        _check(await store.snapshot(), host)
        request = RehearsalRequest(host=host, id=uuid.uuid4().hex, by=user(), at=time.time())
        await store.rehearse(request)
        if not wait:
            say(f"rehearsal on {host} requested; 'tmd status' shows the verdict", err=as_json)
            return
        done = await _verdicts(store, request, timeout)
        for status in done:
            if as_json:
                say_json(_facts(status))
            else:
                say(_line(status))
        if any(verdict.refusal for w in done for verdict in w.rehearsed):
            raise typer.Exit(1)

    with_store(config, ask)


def _check(view: ClusterView, host: str) -> None:
    from tmd.core.planning.standbys import barred
    from tmd.core.values.view_checks import unknown_host

    if unknown := unknown_host(view, host):
        raise TmdError(unknown)
    if host in barred(view):
        raise TmdError(
            f"{host} is drained, or will be, and cannot rehearse: run 'tmd undrain {host}' first"
        )
    if not _waiting(view, host):
        raise TmdError(f"{host} has no waiting standby; check 'tmd status'")
    if view.paused:
        say("the cluster is paused; a rehearsal is not a migration and runs anyway", err=True)


def _waiting(view: ClusterView, host: str) -> list[WorkerStatus]:
    """Workers of ``host`` that hold no rank and take part in no plan."""
    known = view.host(host)
    idle = ("standby", "shadowing", "in step")
    return [w for w in known.workers if w.activity in idle and not w.plan] if known else []


async def _verdicts(
    store: RedisStore, request: RehearsalRequest, timeout_s: float
) -> list[WorkerStatus]:
    """The standbys of the host once each has a verdict or is verified by its shadow.

    Raises:
        TmdError: all workers of the host hold a rank by now, a standby has given no verdict, or the
            request is lost.
    """
    printed: set[str] = set()
    silent: list[WorkerStatus] = []
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                view = await snapshot_when_back(store, printed)
                _refuse_ranks(view, request.host)
                # A later request of another operator replaces this one, and its answers are newer.
                asked = next((r.id for r in view.rehearsals if r.host == request.host), None)
                if asked is None:
                    raise TmdError(f"Redis has lost the request: ask {request.host} again")
                found = _waiting(view, request.host)
                silent = [w for w in found if not _answered(view, w, asked)]
                if found and not silent:
                    return found
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        names = ", ".join(w.worker for w in silent) or request.host
        raise TmdError(
            f"no verdict of {names} after {timeout_s:g} s; a rehearsal needs a job in undisturbed "
            "training; check 'tmd status'"
        ) from None


def _refuse_ranks(view: ClusterView, host: str) -> None:
    known = view.host(host)
    found = known.workers if known is not None else ()
    if found and all(w.rank is not None for w in found):
        ranks = ", ".join(f"{w.worker} holds rank {w.rank}" for w in found)
        raise TmdError(f"{host} has no standby any more: {ranks}")


def _answered(view: ClusterView, status: WorkerStatus, request: str) -> bool:
    from tmd.core.planning.hot_standbys import answered, roles_of
    from tmd.core.planning.migration import PlanFacts

    hot = {u.member.worker for r in view.jobs for u in r.shadows if u.stay}
    if status.worker in hot:
        followed = status.shadow is not None and status.shadow.verified is not None
        return followed or any(v.note for v in status.rehearsed)
    return any(
        answered(status, roles_of(record, PlanFacts(view, record.job)), request)
        for record in view.jobs
        if record.job == status.job
    )


def _line(status: WorkerStatus) -> str:
    if status.shadow is not None and status.shadow.verified is not None:
        what = f"follows rank {status.shadow.rank}, equal at step {status.shadow.verified}"
    else:
        what = verdicts_of(status.rehearsed)
    return f"{status.worker}: {what}"


def _facts(status: WorkerStatus) -> dict[str, Any]:
    return {"worker": status.worker, "rehearsed": status.rehearsed, "shadow": status.shadow}

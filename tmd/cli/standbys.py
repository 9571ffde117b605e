"""``tmd standby``: have the standbys of a host show that they compute the bits of their job."""

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
    # Without this a group of one verb would be that verb.


@standby.command()
def rehearse(
    host: Annotated[str, typer.Argument(help="Host of the standbys, as 'tmd status' shows it.")],
    config: ConfigOption = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return with the verdicts.")
    ] = True,
    timeout: Annotated[float, typer.Option(help="Wait for so many seconds.")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Have each standby of HOST live a step of a rank, of each kind in turn, and compare bits.
    Training goes on; a standby that computed other bits is given no rank, one that cannot be built
    as some ranks none of these. Exit status 1 if it came to that."""
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
        raise TmdError(f"{host} is drained and rehearses nothing; 'tmd undrain {host}' first")
    if not _waiting(view, host):
        raise TmdError(f"no standby waits on {host}; 'tmd status' shows what its workers do")
    if view.paused:
        say("the cluster is paused; a rehearsal is no migration, it is done all the same", err=True)


def _waiting(view: ClusterView, host: str) -> list[WorkerStatus]:
    """Workers of ``host`` that hold no rank and take part in no plan."""
    known = view.host(host)
    idle = ("standby", "shadowing", "in step")
    return [w for w in known.workers if w.activity in idle and not w.plan] if known else []


async def _verdicts(
    store: RedisStore, request: RehearsalRequest, patience_s: float
) -> list[WorkerStatus]:
    """The standbys of the host once each has answered, or is known to compute the bits now."""
    said: set[str] = set()
    try:
        async with asyncio.timeout(patience_s):
            while True:
                view = await snapshot_when_back(store, said)
                found = _waiting(view, request.host)
                if found and all(_answered(view, w, request.id) for w in found):
                    return found
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise TmdError(
            f"no verdict after {patience_s:g} s; a rehearsal needs a job that trains undisturbed, "
            "'tmd status' shows whether one does"
        ) from None


def _answered(view: ClusterView, status: WorkerStatus, request: str) -> bool:
    from tmd.core.planning.hot_standbys import answered, roles_of
    from tmd.core.planning.migration import PlanFacts

    hot = {u.member.worker for r in view.jobs for u in r.understudies if u.stay}
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

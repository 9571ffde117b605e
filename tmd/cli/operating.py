"""Verbs that ask something of the cluster: drain, undrain, set-healthy, pause, resume, events."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Annotated

import typer

from tmd.cli.common import ConfigOption, JsonOption, user, with_store
from tmd.core.errors import TmdError

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.core.model import Alert, ClusterView, JobRecord
    from tmd.core.requests import DrainRequest
    from tmd.daemon.store import RedisStore

LOOK_S = 0.2
HostArgument = Annotated[str, typer.Argument(help="Name of the host, as 'tmd status' shows it.")]


def drain(
    host: HostArgument,
    config: ConfigOption = None,
    leave: Annotated[
        bool, typer.Option("--leave", help="Its workers exit afterwards instead of standing by.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the host holds no rank.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="With --wait: give up after so many seconds.")] = (
        600.0
    ),
) -> None:
    """Move all ranks off HOST while training goes on. Later it may take ranks again, unless it is
    to be left for good (--leave)."""
    from tmd.core.requests import DrainRequest

    async def ask(store: RedisStore, settings: Settings) -> None:
        view = await store.snapshot()
        _check_host(view, host)
        request = DrainRequest(
            host=host, id=uuid.uuid4().hex, leave=leave, by=user(), at=time.time()
        )
        if dry_run:
            _foretell(view, request, settings)
            return
        await store.drain(request)
        typer.echo(f"drain of {host} requested")
        if view.paused:
            typer.echo("the cluster is paused: nothing moves before 'tmd resume'", err=True)
        if wait:
            await _until_empty(store, host, patience_s=timeout)

    with_store(config, ask)


def _foretell(view: ClusterView, request: DrainRequest, settings: Settings) -> None:
    from msgspec import structs

    from tmd.cli.policies import lines, outlook

    others = tuple(d for d in view.drains if d.host != request.host)
    for line in lines(outlook(structs.replace(view, drains=(*others, request)), settings)):
        typer.echo(line)


def undrain(host: HostArgument, config: ConfigOption = None) -> None:
    """Withdraw the drain of HOST; one that was to be left may take ranks again."""

    async def ask(store: RedisStore, _: Settings) -> None:
        if not await store.undrain(host):
            raise TmdError(f"no drain of {host} is requested; 'tmd status' shows which are")
        typer.echo(f"drain of {host} withdrawn")

    with_store(config, ask)


def set_healthy(
    host: HostArgument,
    config: ConfigOption = None,
    code: Annotated[
        str, typer.Option("--code", help="Only findings of this code, as 'tmd status' shows it.")
    ] = "",
) -> None:
    """Declare the findings of HOST to be over, and lift its ban. Who and when stays on record in
    'tmd events'. A detector says a thing once: what goes on is raised again if it comes anew."""
    from tmd.core.requests import HealthyRequest

    async def ask(store: RedisStore, _: Settings) -> None:
        view = await store.snapshot()
        _check_host(view, host)
        request = HealthyRequest(
            host=host, id=uuid.uuid4().hex, code=code, by=user(), at=time.time()
        )
        await store.declare_healthy(request)
        typer.echo(f"{host} declared healthy" + (f" of {code}" if code else ""))
        if view.host(host) is None:
            typer.echo(f"{host} is silent: it hears of this when its daemon is back", err=True)

    with_store(config, ask)


def pause(config: ConfigOption = None) -> None:
    """Open no new migrations, not even after a loss; those under way are finished."""

    async def ask(store: RedisStore, _: Settings) -> None:
        await store.set_paused(True)
        typer.echo("paused: a job that loses a worker waits for 'tmd resume'")

    with_store(config, ask)


def resume(config: ConfigOption = None) -> None:
    """End a pause, and close the circuit breaker."""
    from tmd.core.fuse import Breaker
    from tmd.daemon.judging import told

    async def ask(store: RedisStore, settings: Settings) -> None:
        before = (await store.snapshot()).breaker
        if before.open:
            breaker = Breaker(reason=before.reason, at=time.time(), by=user())
            await store.set_breaker(breaker)
            await store.publish_alert(told(breaker, settings.host.name))
            typer.echo("circuit breaker closed")
        await store.set_paused(False)
        typer.echo("resumed")

    with_store(config, ask)


def events(
    config: ConfigOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they come.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the alerts of the cluster, oldest first."""

    async def tell(store: RedisStore, _: Settings) -> None:
        cursor = ""
        while True:
            found = await store.alerts(cursor, limit=1000)
            for entry in found:
                cursor = entry[0]
                typer.echo(_line(entry[1], as_json))
            if not found and not follow:
                return
            if not found:
                await asyncio.sleep(LOOK_S)

    with_store(config, tell)


def _line(alert: Alert, as_json: bool) -> str:
    if as_json:
        import msgspec

        return msgspec.json.encode(alert).decode()
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(alert.at))
    words = (when, alert.host, alert.state.value, alert.severity.value, alert.code, alert.entity)
    return "  ".join((*words, alert.message)).rstrip()


def _check_host(view: ClusterView, host: str) -> None:
    known = {h.host for h in view.hosts} | set(_members(view))
    if host not in known:
        names = ", ".join(sorted(known)) or "none"
        raise TmdError(f"there is no host '{host}' in this cluster; heard from: {names}")


def _members(view: ClusterView) -> dict[str, list[JobRecord]]:
    """Hosts that hold ranks of jobs that have not ended."""
    found: dict[str, list[JobRecord]] = {}
    for record in view.jobs:
        if record.state.value in ("running", "finishing"):
            for member in record.membership.members:
                found.setdefault(member.host, []).append(record)
    return found


async def _until_empty(store: RedisStore, host: str, *, patience_s: float) -> None:
    said: set[str] = set()
    try:
        async with asyncio.timeout(patience_s):
            while records := _members(await store.snapshot()).get(host):
                for record in records:
                    _say_once(record, said)
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise TmdError(
            f"{host} still holds ranks after {patience_s:g} s; the drain stays requested, "
            "'tmd status' shows what it waits for"
        ) from None
    typer.echo(f"{host} holds no rank")


def _say_once(record: JobRecord, said: set[str]) -> None:
    plan = record.plan
    lines = [record.detail] if record.detail else []
    if plan is not None and not plan.outcome:
        lines.append(f"{record.job}: {plan.id} {plan.phase.value}")
    for line in lines:
        if line not in said:
            said.add(line)
            typer.echo(line)

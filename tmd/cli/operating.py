"""Verbs that ask something of the cluster: drain, undrain, pause, resume."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Annotated

import typer

from tmd.cli.common import ConfigOption, user, with_store
from tmd.core.errors import TmdError

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.core.model import JobRecord
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
    timeout: Annotated[float, typer.Option(help="With --wait: give up after so many seconds.")] = (
        600.0
    ),
) -> None:
    """Move all ranks off HOST while training goes on. Later it may take ranks again, unless it is
    to be left for good (--leave)."""
    from tmd.core.operators import unknown_host
    from tmd.core.requests import DrainRequest

    async def ask(store: RedisStore, _: Settings) -> None:
        view = await store.snapshot()
        if unknown := unknown_host(view, host):
            raise TmdError(unknown)
        request = DrainRequest(
            host=host, id=uuid.uuid4().hex, leave=leave, by=user(), at=time.time()
        )
        await store.drain(request)
        typer.echo(f"drain of {host} requested")
        if view.paused:
            typer.echo("the cluster is paused: nothing moves before 'tmd resume'", err=True)
        if wait:
            await _until_empty(store, host, patience_s=timeout)

    with_store(config, ask)


def undrain(host: HostArgument, config: ConfigOption = None) -> None:
    """Withdraw the drain of HOST; one that was to be left may take ranks again."""

    async def ask(store: RedisStore, _: Settings) -> None:
        if not await store.undrain(host):
            raise TmdError(f"no drain of {host} is requested; 'tmd status' shows which are")
        typer.echo(f"drain of {host} withdrawn")

    with_store(config, ask)


def pause(config: ConfigOption = None) -> None:
    """Open no new migrations, not even after a loss; those under way are finished."""

    async def ask(store: RedisStore, _: Settings) -> None:
        await store.set_paused(True)
        typer.echo("paused: a job that loses a worker waits for 'tmd resume'")

    with_store(config, ask)


def resume(config: ConfigOption = None) -> None:
    """End a pause."""

    async def ask(store: RedisStore, _: Settings) -> None:
        await store.set_paused(False)
        typer.echo("resumed")

    with_store(config, ask)


async def _until_empty(store: RedisStore, host: str, *, patience_s: float) -> None:
    from tmd.core.operators import holdings

    said: set[str] = set()
    try:
        async with asyncio.timeout(patience_s):
            while records := holdings(await store.snapshot()).get(host):
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

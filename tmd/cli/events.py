"""The verb ``events``: the alerts of the cluster, from its stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

from tmd.cli.common import ConfigOption, JsonOption, with_store
from tmd.cli.output import say, say_json
from tmd.core.values.errors import StoreUnavailable, TmdError

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.core.values.model import Alert
    from tmd.daemon.store import RedisStore

LOOK_S = 0.2
AWAY_S = 1.0
REMEMBERED = 20_000
"""How many alerts are remembered, so that a refilled Redis does not print them again."""


def events(
    config: ConfigOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing, also after outages of Redis.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the alerts of the cluster, oldest first."""

    async def show(store: RedisStore, _: Settings) -> None:
        count = 0
        async for alert in _following(store) if follow else _present(store):
            count += 1
            if as_json:
                say_json(alert)
            else:
                say(_line(alert))
        if not count and "Alert" in store.forged_kinds:
            raise TmdError(
                "the secret of this host verifies no alert in Redis: compare [cluster] secret_file "
                "with that of the other hosts"
            )

    with_store(config, show)


async def _present(store: RedisStore, cursor: str = "") -> AsyncIterator[Alert]:
    while found := await store.alerts(cursor, limit=1000):
        cursor = found[-1][0]
        for _, alert in found:
            yield alert


async def _following(store: RedisStore) -> AsyncIterator[Alert]:
    """Runs forever; each alert once. It fails only if Redis is unavailable at the beginning."""
    from tmd.core.alerts.notices import mark

    cursor, away = "", False
    seen: dict[str, None] = {}
    await store.alerts(cursor, limit=1)
    while True:
        try:
            found = await store.alerts(cursor, limit=1000)
        except StoreUnavailable as error:
            if not away:
                say(f"{error}; continuing when Redis is back", err=True)
            away = True
            await asyncio.sleep(AWAY_S)
            continue
        away = False
        for _, alert in found:
            if mark(alert) not in seen:
                seen[mark(alert)] = None
                yield alert
        while len(seen) > REMEMBERED:
            del seen[next(iter(seen))]
        if found:
            cursor = found[-1][0]
        else:
            await asyncio.sleep(LOOK_S)


def _line(alert: Alert) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(alert.at))
    words = (when, alert.host, alert.state.value, alert.severity.value, alert.code, alert.entity)
    return "  ".join((*words, alert.message)).rstrip()

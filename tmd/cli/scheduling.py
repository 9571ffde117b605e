"""Shared by the verbs that keep the drains of a scheduler and of tmd in agreement."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import typer

from tmd.cli.common import say_once
from tmd.cli.output import say
from tmd.core.values.errors import Conflict, StoreUnavailable, TmdError
from tmd.core.values.reasons import in_words
from tmd.core.values.requests import DrainRequest

if TYPE_CHECKING:
    from tmd.core.planning.scheduler_drains import HostRecord
    from tmd.core.values.model import ClusterView
    from tmd.daemon.bus import Store

PAGE = 1000

NamedChange = tuple[str, Callable[[], Awaitable[None]]]
"""A change in words, and what makes it."""
DoneAndFailed = tuple[Sequence[str], Sequence[str]]
"""The result of one look, in sentences: what stays as it is, and each change that failed."""


class SchedulerError(TmdError):
    """The scheduler gives no answer, or refuses a change."""


class HostHistory:
    """Remembers how long each host has had no finding, and what was declared healthy."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[str, HostRecord] = {}
        self._cursor: str | None = None
        self._declared: dict[str, dict[str, float]] = {}
        """Per host, what was declared healthy since the first look (a code, or '' for all), and
        when."""

    async def look(self) -> tuple[ClusterView, Mapping[str, HostRecord], float]:
        """The cluster, what is known of its hosts, and the monotonic time.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        from tmd.core.planning.scheduler_drains import observed

        await self._read_alerts()
        view, now = await self._store.snapshot(), time.monotonic()
        self._records = observed(self._records, view, self._declared, now)
        return view, self._records, now

    async def _read_alerts(self) -> None:
        from tmd.core.alerts.findings import DECLARED, declared_code

        if self._cursor is None:
            self._cursor = await self._store.newest_alert()
        while page := await self._store.alerts(self._cursor, limit=PAGE):
            for _, alert in page:
                if alert.code == DECLARED:
                    self._declared.setdefault(alert.host, {})[declared_code(alert)] = alert.at
            self._cursor = page[-1][0]


class Drains:
    """Sets and withdraws drain requests in the name of a scheduler."""

    def __init__(self, store: Store, *, leave: bool) -> None:
        self._store = store
        self._leave = leave

    def steps(
        self,
        view: ClusterView,
        drain: Iterable[tuple[str, str]],
        undrain: Iterable[str],
        barred: Collection[str] = (),
    ) -> Iterator[NamedChange]:
        """``view``: from which ``drain`` and ``undrain`` were derived. ``barred``: hosts that get
        no rank until their drain is withdrawn."""
        seen = {request.host: request.id for request in view.drains}
        for host, by in drain:
            request = self._request(host, by, bars=host in barred)
            yield f"drain host {host}: {by}", partial(self._swap, host, seen.get(host, ""), request)
        for host in undrain:
            change = partial(self._swap, host, seen[host], None)
            yield f"withdraw the drain of host {host}", change

    async def _swap(self, host: str, seen: str, request: DrainRequest | None) -> None:
        """Change the drain that was seen, never one that an operator has set since.

        Raises:
            Conflict: there is another one now.
        """
        if not await self._store.swap_drain(host, seen, request):
            raise Conflict(f"the drain of {host} has changed since; the next look decides again")

    def _request(self, host: str, by: str, *, bars: bool) -> DrainRequest:
        # In reserve, so that a drain of many nodes leaves no job without standbys, unless somebody
        # waits for the host to be free.
        return DrainRequest(
            host=host,
            id=uuid.uuid4().hex,
            leave=self._leave,
            reserve=not (self._leave or bars),
            by=by,
            at=time.time(),
        )


async def carry_out(steps: Iterable[NamedChange], *, dry_run: bool) -> list[str]:
    """Make each change and print it. Returns a sentence for each one that failed; such a change
    does not stop the others."""
    failed = []
    for line, change in steps:
        if dry_run:
            say(f"would {line}")
            continue
        try:
            await change()
        except (SchedulerError, Conflict) as error:
            failed.append(f"cannot {line}: {in_words(error)}")
        else:
            say(line)
    return failed


async def look_once(look: Callable[[], Awaitable[DoneAndFailed]]) -> None:
    """Print what is left; exit status 1 if a change failed."""
    problems, failed = await look()
    for problem in (*problems, *failed):
        say(f"tmd: {problem}", err=True)
    if failed:
        raise typer.Exit(1)


async def look_always(
    look: Callable[[], Awaitable[DoneAndFailed]], rest: Callable[[], Awaitable[object]]
) -> None:
    """Look until cancelled, with ``rest`` between two looks. A problem is printed once as long as
    it lasts."""
    printed: set[str] = set()
    while True:
        try:
            problems, failed = await look()
        except (StoreUnavailable, SchedulerError) as error:
            problems, failed = (f"{in_words(error)}; trying again",), ()
        lines = [f"tmd: {problem}" for problem in (*problems, *failed)]
        for line in lines:
            say_once(line, printed)
        printed &= set(lines)
        await rest()

"""The verb slurm: keeps the drains of Slurm and of tmd in agreement."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tmd.cli.common import ConfigOption, say_once, with_store
from tmd.cli.output import say
from tmd.core.values.errors import Conflict, StoreUnavailable, TmdError
from tmd.core.values.reasons import in_words
from tmd.core.values.requests import DrainRequest

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.core.planning.slurm import Changes, HostRecord, Rules
    from tmd.core.values.model import ClusterView
    from tmd.daemon.bus import Store
    from tmd.daemon.store import RedisStore

slurm = typer.Typer(help="Work together with the scheduler Slurm.", no_args_is_help=True)

COMMAND_S = 30.0
PAGE = 1000


@slurm.command("sync")
def sync(
    config: ConfigOption = None,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between two looks.")] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    leave: Annotated[
        bool, typer.Option("--leave", help="Workers of a drained host exit once it holds no rank.")
    ] = False,
    drain_nodes: Annotated[
        bool, typer.Option(help="Drain nodes in Slurm for what tmd found on them.")
    ] = True,
    resume_after: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Minutes without a finding, in one run of the daemon, after which its node is "
            "resumed. 'tmd set-healthy' resumes it at once.",
        ),
    ] = 10.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look once and change nothing; print what would be.")
    ] = False,
) -> None:
    """Turn drained nodes of Slurm into drains of tmd, and findings of tmd into drained nodes.

    Each side takes back only what this verb has set. Run it on one host that may use scontrol.
    """

    async def run(store: RedisStore, settings: Settings) -> None:
        rules = Rules(
            drain_nodes=drain_nodes,
            resume_after_s=60 * resume_after,
            hosts_share=settings.breaker.hosts_percent / 100,
        )
        synchronizer = Synchronizer(store, rules, leave=leave)
        if once or dry_run:
            await _once(synchronizer, dry_run=dry_run)
        else:
            await _always(synchronizer, every)

    from tmd.core.planning.slurm import Rules

    with_store(config, run)


async def _once(synchronizer: Synchronizer, *, dry_run: bool) -> None:
    problems, failed = await synchronizer.look(dry_run=dry_run)
    for problem in (*problems, *failed):
        say(f"tmd: {problem}", err=True)
    if failed:
        raise typer.Exit(1)


async def _always(synchronizer: Synchronizer, every: float) -> None:
    """Runs until cancelled. A problem is printed once as long as it lasts."""
    printed: set[str] = set()
    while True:
        try:
            problems, failed = await synchronizer.look()
        except (StoreUnavailable, SlurmError) as error:
            problems, failed = (f"{in_words(error)}; trying again",), ()
        lines = [f"tmd: {problem}" for problem in (*problems, *failed)]
        for line in lines:
            say_once(line, printed)
        printed &= set(lines)
        await asyncio.sleep(every)


class SlurmError(TmdError):
    """A command of Slurm failed."""


class Synchronizer:
    """Looks at both sides and makes them agree; remembers since when hosts are without findings."""

    def __init__(self, store: Store, rules: Rules, *, leave: bool) -> None:
        self._store = store
        self._rules = rules
        self._leave = leave
        self._records: dict[str, HostRecord] = {}
        self._cursor: str | None = None
        self._declared: dict[str, dict[str, float]] = {}
        """Per host, what was declared healthy since the first look (a code, or '' for all), and
        when."""

    async def look(self, *, dry_run: bool = False) -> tuple[Sequence[str], Sequence[str]]:
        """Look once and change what differs. Returns what is left as it is, and each change that
        failed, in sentences. A change that fails does not stop the others.

        Raises:
            StoreUnavailable: Redis does not answer.
            SlurmError: Slurm gives no list of nodes.
        """
        from tmd.core.planning.slurm import SINFO_FORMAT, changes, nodes_of, observed

        options = ("--all", "--Node", "--noheader", "--format", SINFO_FORMAT)
        nodes = nodes_of(await _command("sinfo", *options))
        await self._read_alerts()
        view, now = await self._store.snapshot(), time.monotonic()
        self._records = observed(self._records, view, self._declared, now)
        found = changes(view, nodes, records=self._records, now=now, rules=self._rules)
        failed = []
        for line, change in self.steps(found, view):
            if dry_run:
                say(f"would {line}")
                continue
            try:
                await change()
            except (SlurmError, Conflict) as error:
                failed.append(f"cannot {line}: {in_words(error)}")
            else:
                say(line)
        return found.problems, failed

    def steps(
        self, found: Changes, view: ClusterView
    ) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """Each change in words, and what makes it. ``view``: from which they were derived."""
        seen = {request.host: request.id for request in view.drains}
        for host, by in found.drain:
            request = self._request(host, by)
            yield f"drain host {host}: {by}", partial(self._swap, host, seen.get(host, ""), request)
        for host in found.undrain:
            change = partial(self._swap, host, seen[host], None)
            yield f"withdraw the drain of host {host}", change
        for node, reason in found.mark:
            state = ("State=DRAIN", f"Reason={reason}")
            yield f"drain node {node}: {reason}", partial(_update, node, *state)
        for node in found.resume:
            yield f"take back the drain of node {node}", partial(_update, node, "State=UNDRAIN")

    async def _swap(self, host: str, seen: str, request: DrainRequest | None) -> None:
        """Change the drain that was seen, never one that an operator has set since.

        Raises:
            Conflict: there is another one now.
        """
        if not await self._store.swap_drain(host, seen, request):
            raise Conflict(f"the drain of {host} has changed since; the next look decides again")

    def _request(self, host: str, by: str) -> DrainRequest:
        # In reserve: whoever drains many nodes must not leave a job without any standby.
        return DrainRequest(
            host=host,
            id=uuid.uuid4().hex,
            leave=self._leave,
            reserve=not self._leave,
            by=by,
            at=time.time(),
        )

    async def _read_alerts(self) -> None:
        from tmd.core.alerts.findings import DECLARED, declared_code

        if self._cursor is None:
            self._cursor = await self._store.newest_alert()
        while page := await self._store.alerts(self._cursor, limit=PAGE):
            for _, alert in page:
                if alert.code == DECLARED:
                    self._declared.setdefault(alert.host, {})[declared_code(alert)] = alert.at
            self._cursor = page[-1][0]


async def _update(node: str, *changes: str) -> None:
    await _command("scontrol", "update", f"NodeName={node}", *changes)


async def _command(name: str, *arguments: str) -> str:
    """The output of a command of Slurm.

    Raises:
        SlurmError: it is not installed, fails, or does not answer.
    """
    program = shutil.which(name)
    if program is None:
        raise SlurmError(f"there is no {name} in PATH: run this where Slurm's commands are")
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            out, problem = await process.communicate()
    except TimeoutError:
        raise SlurmError(f"{name} does not answer within {COMMAND_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        why = problem.decode(errors="backslashreplace").strip() or "no reason given"
        raise SlurmError(f"{name} {arguments[0]} failed: {why}")
    return out.decode(errors="backslashreplace")

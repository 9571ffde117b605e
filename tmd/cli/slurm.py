"""The verb slurm: keeps the drains of Slurm and of tmd in agreement."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tmd.cli.common import ConfigOption, with_store
from tmd.cli.scheduling import (
    DoneAndFailed,
    Drains,
    HostHistory,
    NamedChange,
    SchedulerError,
    carry_out,
    look_always,
    look_once,
)

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.core.planning.slurm import SlurmChanges, SlurmRules
    from tmd.core.values.model import ClusterView
    from tmd.daemon.bus import Store
    from tmd.daemon.store import RedisStore

slurm = typer.Typer(help="Work together with the scheduler Slurm.", no_args_is_help=True)

COMMAND_S = 30.0


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
        bool, typer.Option("--dry-run", help="Look once; print the changes and make none.")
    ] = False,
) -> None:
    """Turn drained nodes of Slurm into drains of tmd, and findings of tmd into drained nodes.

    Each side takes back only what this verb has set. Run it on one host that may use scontrol.
    """

    async def run(store: RedisStore, settings: Settings) -> None:
        rules = SlurmRules(
            drain_nodes=drain_nodes,
            resume_after_s=60 * resume_after,
            hosts_share=settings.breaker.hosts_percent / 100,
            leave=leave,
        )
        synchronizer = SlurmSynchronizer(store, rules)
        if once or dry_run:
            await look_once(partial(synchronizer.look, dry_run=dry_run))
        else:
            await look_always(synchronizer.look, partial(asyncio.sleep, every))

    from tmd.core.planning.slurm import SlurmRules

    with_store(config, run)


class SlurmError(SchedulerError):
    """A command of Slurm failed."""


class SlurmSynchronizer:
    """Looks at both sides and makes them agree."""

    def __init__(self, store: Store, rules: SlurmRules) -> None:
        self._history = HostHistory(store)
        self._drains = Drains(store, leave=rules.leave)
        self._rules = rules

    async def look(self, *, dry_run: bool = False) -> DoneAndFailed:
        """Look once and change what differs.

        Raises:
            StoreUnavailable: Redis does not answer.
            SlurmError: Slurm gives no list of nodes.
        """
        from tmd.core.planning.slurm import SINFO_FORMAT, changes, nodes_of

        options = ("--all", "--Node", "--noheader", "--format", SINFO_FORMAT)
        nodes = nodes_of(await _command("sinfo", *options))
        view, records, now = await self._history.look()
        found = changes(view, nodes, records=records, now=now, rules=self._rules)
        return found.problems, await carry_out(self.steps(found, view), dry_run=dry_run)

    def steps(self, found: SlurmChanges, view: ClusterView) -> Iterator[NamedChange]:
        """``view``: from which the changes were derived."""
        yield from self._drains.steps(view, found.drain, found.undrain)
        for node, reason in found.mark:
            state = ("State=DRAIN", f"Reason={reason}")
            yield f"drain node {node}: {reason}", partial(_update, node, *state)
        for node in found.resume:
            yield f"take back the drain of node {node}", partial(_update, node, "State=UNDRAIN")


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
        verb = "" if arguments[0].startswith("-") else f" {arguments[0]}"
        raise SlurmError(f"{name}{verb} failed: {why}")
    return out.decode(errors="backslashreplace")

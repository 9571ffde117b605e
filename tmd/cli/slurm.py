"""The verb slurm: keeps the drains of Slurm and of tmd in agreement."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from typing import TYPE_CHECKING, Annotated

import typer

from tmd.cli.common import ConfigOption, say_once, with_store
from tmd.cli.output import say
from tmd.core.values.errors import StoreUnavailable, TmdError
from tmd.core.values.reasons import in_words
from tmd.core.values.requests import DrainRequest

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.core.planning.slurm import Steps
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
    tell: Annotated[
        bool, typer.Option(help="Drain nodes in Slurm for what tmd found on them.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look once and change nothing; print what would be.")
    ] = False,
) -> None:
    """Turn drained nodes of Slurm into drains of tmd, and findings of tmd into drained nodes.

    Each side takes back only what this verb has set. Run it on one host that may use scontrol.
    """

    async def run(store: RedisStore, _: Settings) -> None:
        printed: set[str] = set()
        while True:
            try:
                await _look(store, leave=leave, tell=tell, dry_run=dry_run)
                printed.clear()
            except (StoreUnavailable, SlurmError) as error:
                if once or dry_run:
                    raise
                say_once(f"tmd: {in_words(error)}; trying again", printed)
            if once or dry_run:
                return
            await asyncio.sleep(every)

    with_store(config, run)


class SlurmError(TmdError):
    """A command of Slurm failed."""


async def _look(store: RedisStore, *, leave: bool, tell: bool, dry_run: bool) -> None:
    from tmd.core.planning.slurm import SINFO_FORMAT, nodes_of, steps

    shown = await _command("sinfo", "--Node", "--noheader", "--format", SINFO_FORMAT)
    found = steps(await store.snapshot(), nodes_of(shown), tell=tell)
    for line in _lines(found):
        say(f"would {line}" if dry_run else line)
    if dry_run:
        return
    for host, by in found.drain:
        request = DrainRequest(host=host, id=uuid.uuid4().hex, leave=leave, by=by, at=time.time())
        await store.drain(request)
    for host in found.undrain:
        await store.undrain(host)
    for node, reason in found.mark:
        await _command("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")
    for node in found.resume:
        await _command("scontrol", "update", f"NodeName={node}", "State=UNDRAIN")


def _lines(found: Steps) -> list[str]:
    return [
        *(f"drain host {host}: {by}" for host, by in found.drain),
        *(f"withdraw the drain of host {host}" for host in found.undrain),
        *(f"drain node {node}: {reason}" for node, reason in found.mark),
        *(f"take back the drain of node {node}" for node in found.resume),
    ]


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

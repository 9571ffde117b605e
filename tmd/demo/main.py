"""``tmd demo``: a cluster on this machine, two events, and the proof that all numbers are equal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tmd import embedded, extras
from tmd.cli import output
from tmd.cli.common import check_folder
from tmd.core.values.errors import ConfigError, StoreUnavailable, TmdError
from tmd.core.values.printable import printable
from tmd.core.values.reasons import in_words
from tmd.demo.cluster import ClusterSpec, LocalCluster
from tmd.demo.page import new_page
from tmd.demo.report import compare, events_of, median_step, read_trace
from tmd.demo.screen import DemoScreen, print_report
from tmd.demo.story import StoryTimes, play, run_golden
from tmd.signals import as_ctrl_c

ACTIVE = ("host-1", "host-2", "host-3", "host-4")
STANDBY = ("host-5",)
OUTPUT = 20
"""Lines of a script that failed."""
SCRIPT = Path(__file__).with_name("train.py")


def demo(
    steps: Annotated[int, typer.Option(min=30, help="Training steps.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of model and data.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the facts to this file.")] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Run this training script instead. It must know --steps N and make N steps.",
        ),
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Serve the page, and print its address and token.")
    ] = False,
) -> None:
    """Train a small GPT on five simulated hosts; drain one, kill another, compare the losses."""
    extras.need_trainer("tmd demo")
    if script is not None and seed:
        raise ConfigError("--seed is for the demo's own script: seed yours in the script")
    if json is not None:
        check_folder("--json", json)
    console = output.console(markup=True)
    own = (str(SCRIPT), "--seed", str(seed))
    command = (*(own if script is None else (str(script),)), "--steps", str(steps))
    with as_ctrl_c(), tempfile.TemporaryDirectory(prefix="tmd-demo-") as folder:
        try:
            well, facts = asyncio.run(_run(console, Path(folder), command, steps, web))
        except KeyboardInterrupt:
            console.print("interrupted; all processes have been stopped")
            raise typer.Exit(130) from None
        except (TimeoutError, RuntimeError) as error:
            raise _failed(error) from error
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=2))
    raise typer.Exit(0 if well else 1)


def _failed(error: Exception) -> TmdError:
    """Prints the end of what the script wrote, which follows the first line of ``error``."""
    why, _, log = in_words(error).partition("\n")
    written = [line for line in log.splitlines() if not line.startswith("{")]  # not the daemon's
    for line in written[-OUTPUT:]:
        typer.echo(printable(line), err=True)
    return TmdError(f"the demo failed: {why.removesuffix(':')}")


async def _run(
    console: Console, folder: Path, script: tuple[str, ...], steps: int, web: bool
) -> tuple[bool, dict[str, object]]:
    with embedded.redis() as redis:
        console.print(f"Redis: {redis.kind}")
        page = new_page(ACTIVE[0], folder) if web else None
        own = {page.host: page.config} if page else {}
        spec = ClusterSpec(folder, redis.url, "demo", ACTIVE, STANDBY, script, own_config=own)
        async with LocalCluster(spec) as cluster:
            if page:
                console.print(page.sentence, highlight=False)
            with DemoScreen(console, steps) as screen:
                times = await _watched(cluster, screen, steps)
            trace = read_trace(cluster.trace)
    with console.status("the same job again, undisturbed and without tmd's control plane"):
        await run_golden(script, len(ACTIVE), folder / "golden", folder / "golden.log")
    found = compare(trace, read_trace(folder / "golden"), times.plans)
    events = events_of(trace, times.plans, times.started, times.seen)
    facts: dict[str, object] = {
        "steps": steps,
        "median_step_s": median_step(trace.of_rank(0)),
        "losses_identical": not found.difference,
        "difference": found.difference,
        "compared_steps": found.steps,
        "unwritten_lines": found.unwritten,
        "events": events,
    }
    print_report(console, facts, events)
    killed = [code for code in times.exits.values() if code != 0]
    same = not found.difference and found.steps == steps
    return same and len(events) == 2 and len(killed) == 1, facts


async def _watched(cluster: LocalCluster, screen: DemoScreen, steps: int) -> StoryTimes:
    """Run the story while the screen shows the cluster.

    Raises:
        KeyboardInterrupt: Ctrl-C; the story has stopped.
    """
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    playing = asyncio.create_task(play(cluster, steps, screen.say))
    others = [
        asyncio.create_task(_follow(cluster, screen.show)),
        asyncio.create_task(interrupted.wait()),
    ]
    try:
        await asyncio.wait({playing, others[1]}, return_when=asyncio.FIRST_COMPLETED)
        while interrupted.is_set() and not playing.done():
            # Repeated: a client library may lose a cancellation.
            playing.cancel()
            await asyncio.wait({playing}, timeout=0.2)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        for task in (playing, *others):
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    if interrupted.is_set():
        raise KeyboardInterrupt
    return playing.result()


async def _follow(cluster: LocalCluster, show: Callable[..., None]) -> None:
    leader = ""
    async for view in cluster.views():
        with contextlib.suppress(StoreUnavailable):
            leader = (await cluster.leader()).partition("#")[0]
        show(view, leader)

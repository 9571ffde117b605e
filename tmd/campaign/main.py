"""``tmd campaign``: break a cluster on this machine in every way, and compare."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from msgspec import structs
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tmd import embedded, extras
from tmd.campaign import draw, other_release, page, reading
from tmd.campaign.campaign import CampaignOutcome, Result, run
from tmd.campaign.faults import KINDS
from tmd.campaign.kind import FaultKind
from tmd.campaign.other_release import OtherRelease
from tmd.campaign.scenario import Scenario, Story
from tmd.cli import output
from tmd.cli.common import check_folder
from tmd.core.values.errors import ConfigError, TmdError
from tmd.core.values.reasons import in_words
from tmd.signals import as_ctrl_c

INTERRUPTED = 130
SEEDS = 1 << 32
MARKS = {True: "[green]as expected[/]", False: "[bold red]DEVIATION[/]"}


campaign = typer.Typer(
    name="campaign",
    help="Break a cluster on this machine in every way, and compare.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


@campaign.command("run")
def play(
    files: Annotated[
        list[str] | None,
        typer.Argument(help="Scenario files, or names of shipped ones. [default: all shipped]"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this scenario; may be given several times.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed for the draws of --rounds. [default: random]")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=0, help="Draw so many of the scenarios at random, on one job.")
    ] = 0,
    other: Annotated[
        Path | None,
        typer.Option(help="Virtual environment with another release of tmd, for 'upgrade*'."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the results into this file; '-': stdout.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page: FILE.html or FILE.md.")] = None,
) -> None:
    """Play scenarios on a cluster of processes on this machine. Each breaks something, and the
    outcome must be the one that it states. In the end losses and weights must equal those of an
    undisturbed run. Exit status: 0 as expected, 1 a deviation, 2 wrong usage or scenario file."""
    _check_files(report, json)
    seed = secrets.randbelow(SEEDS) if seed is None else seed
    stories = wanted(files or (), only or (), seed, rounds)
    extras.need_trainer("tmd campaign run")
    embedded.check()
    release = None if other is None else other_release.find(other)
    # With facts on stdout, messages go to stderr.
    console = output.console(markup=True, stderr=json == Path("-"))
    words = () if other is None else ("--other", str(other))
    command = repeat_command((*(files or ()), *words), only or (), seed, rounds)
    console.print(f"[dim]{escape(command)}[/]")
    try:
        outcome = _played(stories, console, release)
    except KeyboardInterrupt:
        console.print("interrupted; all processes of the campaign have ended")
        raise typer.Exit(INTERRUPTED) from None
    except (RuntimeError, TimeoutError) as error:
        raise TmdError(f"the campaign failed: {in_words(error)}") from error
    if json is not None:
        _write(facts(outcome, seed, command, release), json)
    if report is not None:
        page.write(outcome, command, report)
    summarise(console, outcome, Asked(files or (), only or (), words, seed, rounds))
    raise typer.Exit(0 if outcome.well else 1)


def wanted(files: Sequence[str], only: Sequence[str], seed: int, rounds: int) -> tuple[Story, ...]:
    """The stories to play.

    Raises:
        ConfigError: a file is missing or wrong, or there is no such scenario.
    """
    stories = chosen(reading.stories(files, KINDS), only)
    if not rounds:
        return stories
    return (draw.drawn(drawable(stories), seed, rounds, draw.cluster_of(stories)),)


def chosen(stories: Sequence[Story], names: Sequence[str]) -> tuple[Story, ...]:
    """``stories`` with only the named scenarios, or all of them without names.

    Raises:
        ConfigError: there is no such scenario.
    """
    known = {scenario.name for story in stories for scenario in story.scenarios}
    for name in names:
        if name not in known:
            problem = f"there is no scenario '{name}'{reading.nearest(name, known)}"
            raise ConfigError(f"--only: {problem}")
    if not names:
        return tuple(stories)
    cut = [
        structs.replace(story, scenarios=tuple(s for s in story.scenarios if s.name in names))
        for story in stories
    ]
    return tuple(story for story in cut if story.scenarios)


def drawable(stories: Sequence[Story]) -> list[Scenario]:
    """Scenarios that may be drawn at random.

    They do not depend on what this machine can play: a seed draws the same ones on every machine.

    Raises:
        ConfigError: there is none.
    """
    found = draw.pool(stories)
    if not found:
        raise ConfigError(
            "--rounds: none of these scenarios can be drawn. Not drawn are those with 'draw = "
            "false', with their own number of standbys, in a file with [job] arguments, or on a "
            "cluster that the other files do not share: choose other files"
        )
    return found


def repeat_command(files: Sequence[str], only: Sequence[str], seed: int, rounds: int) -> str:
    """The command line that repeats the campaign."""
    words = ["tmd", "campaign", "run", *files]
    for name in only:
        words += ["--only", name]
    if rounds:
        words += ["--rounds", str(rounds), "--seed", str(seed)]
    return shlex.join(words)


class Asked(NamedTuple):
    """What the user asked for."""

    files: Sequence[str]
    only: Sequence[str]
    words: Sequence[str]
    """Further words of the command line."""
    seed: int
    rounds: int

    def again(self, story: str, scenario: str = "") -> str:
        """The command that plays ``scenario`` again, or else all that was asked of ``story``."""
        if self.rounds:
            number = int(scenario.partition("-")[0]) if scenario else self.rounds
            return repeat_command((*self.files, *self.words), self.only, self.seed, number)
        named = next((f for f in self.files if Path(f).stem == story), story)
        only = (scenario,) if scenario else self.only
        return repeat_command((named, *self.words), only, self.seed, 0)


@as_ctrl_c()
def _played(
    stories: Sequence[Story], console: Console, other: OtherRelease | None
) -> CampaignOutcome:
    return asyncio.run(_watched(stories, console, other))


async def _watched(
    stories: Sequence[Story], console: Console, other: OtherRelease | None
) -> CampaignOutcome:
    """Run with a progress display.

    Raises:
        KeyboardInterrupt: Ctrl-C, after all processes have ended.
    """
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        playing = asyncio.create_task(run(stories, CampaignScreen(stories, console, bar), other))
        waiting = asyncio.create_task(interrupted.wait())
        await asyncio.wait((playing, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if interrupted.is_set():
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            raise KeyboardInterrupt
        return await playing


class CampaignScreen:
    """A progress bar on a terminal, and a line for each scenario that has ended."""

    def __init__(self, stories: Sequence[Story], console: Console, bar: Progress) -> None:
        count = sum(scenario.repeat for story in stories for scenario in story.scenarios)
        self._console, self._bar = console, bar
        self._task = bar.add_task("", total=count)

    def begins(self, story: str, what: str) -> None:
        self._bar.update(self._task, description=f"{story}: {what}")

    def ended(self, result: Result) -> None:
        seen = result.seen
        mark = "[yellow]not possible here[/]" if seen.skipped else MARKS[not result.deviations]
        more = f"  {seen.skipped}" if seen.skipped else f"  {seen.seconds:.1f} s"
        named = escape(f"{result.story}: {result.scenario.name}")
        self._console.print(f"{named}  {mark}{escape(more)}")
        self._bar.advance(self._task)


def summarise(console: Console, outcome: CampaignOutcome, asked: Asked) -> None:
    """Print all deviations with the commands that repeat them."""
    for result in outcome.results:
        for text in result.deviations:
            console.print(
                f"{result.story}: {result.scenario.name}: ", end="", style="red", markup=False
            )
            console.print(text, markup=False)
        if result.deviations:
            again = asked.again(result.story, result.scenario.name)
            console.print(f"  again: {again}", markup=False)
    for ending in outcome.endings:
        for text in ending.deviations:
            console.print(f"{ending.story}: the job: ", end="", style="red", markup=False)
            console.print(text, markup=False)
        if ending.deviations:
            console.print(f"  again: {asked.again(ending.story)}", markup=False)
    console.print(page.summary(outcome))


def facts(
    outcome: CampaignOutcome, seed: int, command: str, other: OtherRelease | None = None
) -> dict[str, object]:
    """The outcome for programs."""
    return {
        "well": outcome.well,
        "seed": seed,
        "command": command,
        "other": None if other is None else other.version,
        "seconds": outcome.seconds,
        "results": outcome.results,
        "endings": outcome.endings,
    }


def _check_files(report: Path | None, json: Path | None) -> None:
    """Check the names and folders of the files to write before the campaign runs.

    Raises:
        ConfigError: one of them cannot be written.
    """
    if report is not None:
        page.check(report)
        check_folder("--report", report)
    if json is not None:
        check_folder("--json", json)


def _write(value: object, file: Path) -> None:
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    if file == Path("-"):
        sys.stdout.buffer.write(text + b"\n")
    else:
        file.write_bytes(text + b"\n")


def _unable(kind: FaultKind) -> str:
    """Why ``tmd campaign run`` cannot play it here without further options; empty if it can."""
    return kind.unable() or ("needs another release: --other FOLDER" if kind.needs_other else "")


@campaign.command("list")
def catalogue(
    as_json: Annotated[bool, typer.Option("--json", help="Output for programs.")] = False,
) -> None:
    """List the kinds of faults and the scenarios that come with tmd."""
    stories = reading.stories((), KINDS)
    if as_json:
        kinds = [{"kind": k.name, "about": k.about, "unable": _unable(k)} for k in KINDS.values()]
        _write({"kinds": kinds, "stories": stories}, Path("-"))
        return
    used = {fault.kind for s in stories for scenario in s.scenarios for fault in scenario.faults}
    for kind in KINDS.values():
        reason = f"  (not possible here: {why})" if (why := _unable(kind)) else ""
        output.say(f"{kind.name:28} {kind.about}{reason}")
    for story in stories:
        output.say()
        output.say(f"{story.name}: {', '.join(s.name for s in story.scenarios)}")
    count = sum(len(story.scenarios) for story in stories)
    output.say()
    output.say(f"{len(KINDS)} kinds, {len(used)} of them in {count} scenarios")

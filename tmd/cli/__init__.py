"""The command ``tmd``: thin verbs over the parts below.

Heavy imports wait until a verb runs, so that help and completion are fast. Exit status: 0 success,
1 failure, 2 wrong usage or configuration, 130 interrupted. A verb that differs says so. An error is
one sentence with the next step.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tmd import __version__
from tmd.cli import (
    doctor,
    events,
    injecting,
    inspecting,
    installing,
    kubernetes,
    observing,
    operating,
    policies,
    slurm,
    standbys,
    status,
    xids,
)
from tmd.cli.common import ConfigOption
from tmd.cli.output import say, say_lines
from tmd.cli.script_last import ScriptLast
from tmd.core.values.errors import ConfigError, PluginError, TmdError
from tmd.core.values.reasons import os_reason

FAILED, USAGE, INTERRUPTED = 1, 2, 130
UNREACHABLE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR)
"""Errors about a path that the user has named, or about the folder in which the command runs."""

LAZY = {
    "advise": (
        "tmd.simulate.advising:advise",
        "Recommend how many standbys to keep, and how often to save.",
    ),
    "campaign": (
        "tmd.campaign.main:campaign",
        "Break a cluster on this machine in every way, and compare.",
    ),
    "demo": (
        "tmd.demo.main:demo",
        "Try tmd on this machine: break a training job and watch it continue.",
    ),
    "launch": ("tmd.cli.launching:launch", "Start this host's workers of a job."),
    "simulate": (
        "tmd.simulate.main:simulate",
        "Compare ways to go on after a loss, in virtual time.",
    ),
}
"""Verbs whose modules are imported when they run: verb -> (function or group, help)."""


class Verbs(TyperGroup):
    """Lists the lazy verbs by name; loads one only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted([*super().list_commands(ctx), *LAZY])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known = super().get_command(ctx, cmd_name)
        if known is not None or cmd_name not in LAZY:
            return known
        return typer.core.TyperCommand(cmd_name, help=LAZY[cmd_name][1], rich_markup_mode=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in LAZY:
            return args[0], _load(args[0]), args[1:]
        return super().resolve_command(ctx, args)


def _load(verb: str) -> Any:
    module, _, function = LAZY[verb][0].partition(":")
    found = getattr(importlib.import_module(module), function)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    loaded = typer.Typer(
        pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None
    )
    loaded.command(verb, cls=ScriptLast if verb == "launch" else None)(found)
    return typer.main.get_command(loaded)


app = typer.Typer(
    cls=Verbs,
    help="Keeps a distributed PyTorch job running while its machines fail or are replaced.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(status.status)
app.command()(operating.drain)
app.command()(operating.undrain)
app.command()(operating.set_healthy)
app.command()(operating.forget)
app.command()(operating.pause)
app.command()(operating.resume)
app.command()(events.events)
app.command()(injecting.inject)
app.command()(inspecting.plugins)
app.command()(observing.scan)
app.command()(doctor.doctor)
app.command()(installing.man)
app.add_typer(observing.detectors, name="detectors")
app.add_typer(inspecting.config, name="config")
app.add_typer(kubernetes.kubernetes, name="kubernetes")
app.add_typer(installing.monitoring, name="monitoring")
app.add_typer(policies.policy, name="policy")
app.add_typer(slurm.slurm, name="slurm")
app.add_typer(standbys.standby, name="standby")
app.add_typer(installing.systemd, name="systemd")
app.add_typer(xids.xid, name="xid")


def _version(wanted: bool) -> None:
    if wanted:
        say(f"tmd {__version__}")
        raise typer.Exit


@app.callback()
def options(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration file for any verb.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if config is not None:
        os.environ["TMD_CONFIG"] = str(config)


@app.command()
def daemon(config: ConfigOption = None) -> None:
    """Run the daemon of this host until SIGTERM or SIGINT; SIGHUP reads the configuration again."""
    # Replace this process: the code that parsed the command line would stay in the daemon's memory.
    options = [] if config is None else ["--config", str(config)]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tmd.daemon", *options])


def verbs() -> Any:
    """The whole command with every verb loaded, also the lazy ones."""
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    for verb in LAZY:
        root.add_command(_load(verb), verb)
    return root


def main() -> None:
    """Entry point: turns errors into a sentence and an exit status."""
    try:
        app()
    except (ConfigError, PluginError) as error:
        _fail(error, USAGE)
    except TmdError as error:
        _fail(error, FAILED)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except ExceptionGroup as group:
        if group.split(BrokenPipeError)[1] is not None:
            raise
        _print_no_more()
        raise SystemExit(FAILED) from None  # as Typer ends a verb whose output is a closed pipe
    except UnicodeEncodeError as error:
        if all(map(_is_utf8, sys.argv)):
            raise
        _fail(f"an argument is not valid UTF-8: {error.object!a}", USAGE)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _print_no_more()
            _fail(f"the output cannot be written: {os_reason(error)}", FAILED)
        if error.errno not in UNREACHABLE:
            raise
        if error.filename is None and _has_working_folder():
            _fail(os_reason(error), FAILED)
        _fail(f"{error.filename or 'the working folder'} cannot be used: {os_reason(error)}", USAGE)


def _is_utf8(argument: str) -> bool:
    return argument.encode(errors="replace") == argument.encode(errors="surrogateescape")


def _has_working_folder() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _print_no_more() -> None:
    """Send further output to ``/dev/null``: nobody reads it (``| head``), or the disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: TmdError | str, code: int) -> None:
    # Only a configuration error has several lines.
    print_error = say_lines if isinstance(error, ConfigError) else say
    print_error(f"tmd: {error}", err=True)
    raise SystemExit(code) from None

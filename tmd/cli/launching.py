"""The verb ``launch``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import structlog
import typer

from tmd.cli import output
from tmd.command import attached, command_of, missing
from tmd.config import load
from tmd.core.values.errors import ConfigError
from tmd.core.values.names import wrong_name
from tmd.core.values.reasons import in_words, os_reason, place_remedy
from tmd.daemon import logs
from tmd.launcher import GRACE_S, NOT_STARTED, RESTART_S, Launcher, LaunchSpec
from tmd.starting import CannotStart

log = structlog.get_logger("tmd.launch")

RestartDelay = Annotated[
    float, typer.Option(min=0, help="Seconds before a restart; failures in a row double it.")
]
Grace = Annotated[
    float, typer.Option(min=0, help="Seconds from SIGTERM to SIGKILL for the workers.")
]


def launch(
    script: Annotated[
        list[str],
        typer.Argument(help="Training script (or -m MODULE, or a program) and its arguments."),
    ],
    job: Annotated[str, typer.Option(help="Name of the job, the same on all hosts.")],
    nnodes: Annotated[int, typer.Option(min=1, help="Hosts that hold ranks, without standbys.")],
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Workers on this host.")] = 1,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="tmd.toml")] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often a worker slot is started again, as a standby.")
    ] = 3,
    restart_delay: RestartDelay = RESTART_S,
    grace: Grace = GRACE_S,
    one_run: Annotated[bool, typer.Option("--one-run", help="Exit if training is over.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Folder for one line per step.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for the workers' output.")] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Run an unchanged script of a known framework.")
    ] = False,
) -> None:
    """Start this host's workers of a job. The same command on active and standby hosts.

    Exit status: 0 if all workers ended well, 2 if the command cannot be started, else that of a
    worker that failed and was not restarted.
    """
    if why := wrong_name(job):
        raise ConfigError(f"--job: {why}")
    command = _found(command_of(attached(script) if auto else script))
    for option, folder in (("--trace", trace), ("--log-dir", log_dir)):
        _make(option, folder)
    settings = load(config)
    logs.configure(settings.log, host=settings.host.name)
    spec = LaunchSpec(
        job=job,
        host=settings.host.name,
        socket=settings.host.socket,
        advertise=settings.host.advertise,
        world_size=nnodes * nproc_per_node,
        local_size=nproc_per_node,
        command=command,
        max_restarts=max_restarts,
        restart_delay_s=restart_delay,
        grace_s=grace,
        one_run=one_run,
        trace=trace,
        log_dir=log_dir,
    )
    raise typer.Exit(_run(spec))


def _found(command: tuple[str, ...]) -> tuple[str, ...]:
    if why := missing(command):
        output.say(f"tmd launch: {why}", err=True)
        raise typer.Exit(NOT_STARTED)
    return command


def _make(option: str, folder: Path | None) -> None:
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{os_reason(error)}; {place_remedy(error)}"
        raise ConfigError(f"{option} {folder}: {why}") from None


def _run(spec: LaunchSpec) -> int:
    log.info("launching", job=spec.job, host=spec.host, command=shlex.join(spec.command))
    try:
        return Launcher(spec).run()
    except CannotStart as error:
        output.say(f"tmd launch: {in_words(error)}", err=True)
        return NOT_STARTED

"""Verbs that install: config init, systemd install, monitoring install, man."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from tmd import __version__
from tmd.cli import manual, shipped
from tmd.cli.common import ConfigOption
from tmd.cli.inspecting import config
from tmd.cli.output import say, say_lines, say_page

systemd = typer.Typer(help="Run the daemon as a systemd service.", no_args_is_help=True)

monitoring = typer.Typer(help="Watch tmd with Prometheus and Grafana.", no_args_is_help=True)

ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Write nothing; list the files that would be written.")
]
HIDDEN = {
    "/home": "ProtectHome=yes",
    "/root": "ProtectHome=yes",
    "/run/user": "ProtectHome=yes",
    "/tmp": "PrivateTmp=yes",
    "/var/tmp": "PrivateTmp=yes",
}
"""Folders that the unit hides from the daemon, and the line that does so."""
MOST_LINKS = 40
"""Links on the way to a file, as in Linux; more are a loop."""


@config.command("init")
def init(
    to: Annotated[Path, typer.Option(help="Folder for the files.")] = Path(shipped.FOLDER),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite existing files, except the secret.")
    ] = False,
    new_secret: Annotated[
        bool,
        typer.Option("--new-secret", help="With --force: replace the cluster secret, too."),
    ] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Write a starting configuration: tmd.toml, a new cluster secret, the users of Redis."""
    to = to.absolute()
    files = shipped.configuration(to, secrets.token_hex(32))
    secret = to / shipped.SECRET
    keeps = force and not new_secret and secret.exists()
    _write(
        tuple(file for file in files if not (keeps and file.path == secret)),
        force=force,
        dry_run=dry_run,
    )
    if keeps:
        verb = "would keep" if dry_run else "kept"
        say(f"{verb} {secret}, which other hosts may have: --new-secret replaces it", err=dry_run)
    if not dry_run:
        say(f"Next: set [redis] url in {to / 'tmd.toml'}, replace both CHANGE-ME passwords")
        say(f"in {to / 'redis.acl'} and load it into Redis, copy tmd.toml and secret to the")
        say(f"other hosts, and run: tmd config check -c {to / 'tmd.toml'}")


@systemd.command("install")
def install_systemd(
    to: Annotated[Path, typer.Option(help="Folder for the unit.")] = Path("/etc/systemd/system"),
    settings: ConfigOption = None,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Install the unit tmd.service, for the Python environment that runs this command."""
    from tmd.config import DEFAULT_FILE, find_file

    python = Path(sys.executable)
    has_program = (python.parent / "tmd-daemon").exists()
    command = shipped.daemon_command(python, has_program=has_program)
    file = (find_file(settings) or DEFAULT_FILE).absolute()
    unit = shipped.unit(to.absolute(), command, file)
    _warn_of_hidden(python, "install tmd with a Python elsewhere, for example in /opt/tmd")
    _warn_of_hidden(file, "move it elsewhere, for example to /etc/tmd")
    if dry_run:
        say_page(unit.text)
    _write((unit,), force=force, dry_run=dry_run)
    if dry_run:
        return
    if complaints := _complaints_about(unit.path):
        say_lines(f"tmd: systemd-analyze verify {unit.path}: {complaints}", err=True)
        raise typer.Exit(1)
    say("Next: tmd man --to /usr/local/share/man")
    say("      systemctl daemon-reload && systemctl enable --now tmd")
    say("      journalctl -u tmd -f")


@monitoring.command("install")
def install_monitoring(
    to: Annotated[Path, typer.Option(help="Folder for the files.")],
    docs: Annotated[
        str, typer.Option(help="Address of tmd's documentation, to which each alert links.")
    ] = shipped.DOCUMENTATION,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Write alert rules for Prometheus and a dashboard for Grafana."""
    to = to.absolute()
    _write(shipped.monitoring(to, docs), force=force, dry_run=dry_run)
    if dry_run:
        return
    if docs == shipped.DOCUMENTATION:
        say(f"The runbook links lead to {docs}: --docs sets the address of your documentation")
    say(f"Next: name {to / 'tmd-alerts.yml'} under rule_files of prometheus.yml and reload it,")
    say(f"      and import {to / 'tmd-dashboard.json'} into Grafana")


def man(
    to: Annotated[
        Path | None,
        typer.Option(help="Write man8/tmd.8 below this folder. [default: print the page]"),
    ] = None,
) -> None:
    """Print the manual page tmd(8), or install it: tmd man --to /usr/local/share/man."""
    from tmd import cli

    text = manual.page(cli.verbs(), __version__)
    if to is None:
        say_page(text)
        return
    page = shipped.File(to.absolute() / "man8" / "tmd.8", text, 0o644)
    # The page is generated from the program: an older one is never worth keeping.
    _write((page,), force=True, dry_run=False)


def _write(files: tuple[shipped.File, ...], *, force: bool, dry_run: bool) -> None:
    if dry_run:
        shipped.check(files, force=force)
    else:
        shipped.write(files, force=force)
    for file in files:
        verb = "would write" if dry_run else "wrote"
        say(f"{verb} {file.path} (mode {file.mode:04o})", err=dry_run)


def _warn_of_hidden(path: Path, remedy: str) -> None:
    for place in _through_links(path):
        for folder, line in HIDDEN.items():
            if place.is_relative_to(folder):
                text = f"the unit hides {place} from the daemon ({line}): {remedy}"
                say(f"tmd: warning: {text}", err=True)


def _through_links(path: Path) -> list[Path]:
    """``path``, and each place to which a link on the way to it leads."""
    found = [path]
    for place in found:  # grows
        for part in (place, *place.parents):
            with suppress(OSError):  # no link, or in a folder that may not be looked into
                target = os.path.normpath(part.parent / os.readlink(part))
                if len(found) < MOST_LINKS:
                    found.append(Path(target, place.relative_to(part)))
    return list(dict.fromkeys(found))


def _complaints_about(unit: Path) -> str:
    """What systemd refuses in the unit; empty also if its checker is not installed."""
    program = shutil.which("systemd-analyze")
    if program is None:
        return ""
    done = subprocess.run(
        [program, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    return done.stderr.strip() if done.returncode else ""

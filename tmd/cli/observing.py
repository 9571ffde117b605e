"""Verbs that watch this host without a cluster: detectors list, detectors run, scan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tmd.cli.common import ConfigOption, JsonOption
from tmd.cli.output import draw, print_json, say, say_json, say_lines, table
from tmd.core.values.errors import PluginError

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.core.values.model import Alert, Signal
    from tmd.daemon.plugins import LoadedDetector

HEALTHY, DEGRADED, FAILED, UNKNOWN = 0, 1, 2, 3

detectors = typer.Typer(help="List detectors, or run one in the foreground.", no_args_is_help=True)


@detectors.command("list")
def list_(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the installed detectors, whether they work here, and their own keys."""
    from tmd.cli.inspecting import plugin_rows
    from tmd.config import load

    settings = load(config)
    rows = [row for row in plugin_rows(settings) if row["kind"] == "detector"]
    keys = {d.origin.name: list(d.config.__struct_fields__) for d in _loaded(settings, rows)}
    if as_json:
        found = [{**row, "keys": keys.get(row["name"], [])} for row in rows]
        print_json(found)
    else:
        shown = [(row["name"], row["use"], ", ".join(keys.get(row["name"], []))) for row in rows]
        draw(table(("name", "use", "own keys"), shown))
    for row in rows:
        if row["problem"]:
            say_lines(row["problem"], err=True)
    if any(row["problem"] for row in rows):
        raise typer.Exit(1)


@detectors.command("run")
def run(
    name: Annotated[str, typer.Argument(help="Name, as in 'tmd detectors list'.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one detector in the foreground and print its signals as they come; Ctrl-C ends it."""
    from tmd.cli.foreground import watch
    from tmd.config import load
    from tmd.daemon.plugins import load_detectors

    settings = load(config)
    known = {found.origin.name: found for found in load_detectors(settings)}
    if name not in known:
        names = ", ".join(known) or "none"
        raise PluginError(f"no detector '{name}' is installed and enabled; available: {names}")
    why_not = known[name].why_not()
    if why_not is not None:
        say(f"tmd: {name} does not work on this host: {why_not}", err=True)
        raise typer.Exit(1)
    say(f"running {name}; stop it with Ctrl-C", err=True)

    def hear(detector: str, signal: Signal) -> None:
        if as_json:
            say_json(_facts(detector, signal))
        else:
            say(_line(detector, signal))

    watch(settings, [known[name]], hear)


def scan(
    config: ConfigOption = None,
    as_json: JsonOption = False,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            min=0.1,
            help="How long the detectors run. A check that takes longer has no result.",
        ),
    ] = 12.0,
) -> None:
    """Run all detectors on this host once. No Redis is needed.

    Exit status: 0 healthy, 1 degraded or a warning, 2 something has failed, 3 nothing has failed
    but a detector has no result, as with a driver that hangs, 128 more than the number of the
    signal that ended it early, as 130: nothing is known then.
    """
    from tmd.cli.foreground import CutShort, watch
    from tmd.config import load
    from tmd.daemon.plugins import load_detectors

    settings = load(config)
    found = load_detectors(settings)
    reasons = {d.origin.name: _why_unused(d) for d in found}
    unused = {name: reason for name, reason in reasons.items() if reason is not None}
    try:
        alerts, pending = watch(settings, found, lambda *_: None, seconds)
    except CutShort as end:
        text = f"{end.name} ended the scan before its {seconds:g} s were over: no result"
        say(f"tmd: {text}", err=True)
        raise typer.Exit(128 + end.number) from None
    if as_json:
        watched = [name for name in reasons if name not in unused]
        more = {"unused": unused, "without_result": pending}
        print_json({"alerts": alerts, "watched": watched, **more})
    else:
        _print_scan(alerts, unused)
        for name in pending:
            say(
                f"{name} has no result after {seconds:g} s, so the state of the host is unknown: a "
                "driver or a disk may hang, or it needs more time: use --seconds",
                err=True,
            )
    status = health(alerts)
    if pending and status != FAILED:
        status = UNKNOWN
    if status:
        raise typer.Exit(status)


def _why_unused(detector: LoadedDetector) -> str | None:
    """Why it does not run here. One that cannot say is run, and fails with a finding."""
    try:
        return detector.why_not()
    except PluginError:
        return None


def health(alerts: tuple[Alert, ...]) -> int:
    """The exit status for ``alerts``."""
    from tmd.core.values.model import Severity

    severities = {alert.severity for alert in alerts} - {Severity.INFO}
    if Severity.FATAL in severities:
        return FAILED
    return DEGRADED if severities else HEALTHY


def _loaded(settings: Settings, rows: list[dict[str, str]]) -> list[LoadedDetector]:
    """The enabled detectors, or none if one is broken: the rows show the error."""
    from tmd.daemon.plugins import load_detectors

    return [] if any(row["problem"] for row in rows) else load_detectors(settings)


# --- output ---------------------------------------------------------------------------------------


def _print_scan(alerts: tuple[Alert, ...], unused: dict[str, str]) -> None:
    rows = [(a.severity.value, a.code, a.entity, a.message) for a in alerts]
    if rows:
        draw(table(("severity", "code", "entity", "message"), rows))
    else:
        say("no findings")
    for name, reason in unused.items():
        say(f"{name} was not run: {reason}", err=True)


def _line(detector: str, signal: Signal) -> str:
    words = (signal.state.value, signal.severity.value, signal.code, signal.entity, signal.message)
    return "  ".join((detector, *words)).rstrip()


def _facts(detector: str, signal: Signal) -> dict[str, Any]:
    from msgspec import structs

    return {"detector": detector, **structs.asdict(signal)}

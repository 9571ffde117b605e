"""The verb inject: raises a test finding to rehearse what the cluster would do."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tmd.cli.common import ConfigOption, JsonOption, with_store
from tmd.cli.output import print_json, say
from tmd.core.values.errors import ConfigError, TmdError
from tmd.core.values.model import Severity
from tmd.core.values.printable import printable
from tmd.core.values.reasons import os_reason

if TYPE_CHECKING:
    from tmd import wire
    from tmd.config import Settings
    from tmd.core.values.model import Alert, ClusterView, Signal
    from tmd.daemon.store import RedisStore

ANSWER_S = 10.0
HOST = "host"
_INCOMPLETE = {
    "XID": "the XID or its GPU is missing: 'tmd inject xid 79 --gpu 0000:3b:00.0'",
    "SXid": "the SXid or its NVSwitch is missing: 'tmd inject sxid 20034 --switch 0000:05:00.0'",
}

GpuOption = Annotated[
    str, typer.Option(help="PCI address of a GPU, '0000:3b:00.0', in place of --entity.")
]
ForOption = Annotated[
    float,
    typer.Option(
        "--for", min=0, help="Seconds until it clears. With 0 the daemon's end clears it."
    ),
]
ClearOption = Annotated[
    bool,
    typer.Option(
        "--clear", help="Clear the injected findings: all, or those of CODE or of a detector."
    ),
]
SwitchOption = Annotated[
    str, typer.Option(help="PCI address of an NVSwitch, '0000:05:00.0', in place of --entity.")
]


def _codes(incomplete: str) -> list[str]:
    """Shell completion: the known beginnings of codes."""
    from importlib.metadata import entry_points

    begins = [
        "xid",
        "sxid",
        *sorted(f"{point.name}." for point in entry_points(group="tmd.detectors")),
    ]
    return [word for word in begins if word.startswith(incomplete)]


def inject(
    code: Annotated[
        str,
        typer.Argument(
            help="A code as in 'tmd status': 'nic.down'; or 'xid' or 'sxid', and its NUMBER.",
            autocompletion=_codes,
        ),
    ] = "",
    number: Annotated[
        int | None, typer.Argument(help="Number of the XID or SXid, as in 'tmd xid list'.")
    ] = None,
    config: ConfigOption = None,
    entity: Annotated[
        str, typer.Option(help="Entity of the finding: 'nic:eth0', a worker. [default: host]")
    ] = "",
    gpu: GpuOption = "",
    switch: SwitchOption = "",
    severity: Annotated[
        Severity | None, typer.Option(help="[default: warning; for an XID, as in its table]")
    ] = None,
    message: Annotated[
        str, typer.Option(help="Message; for an XID the driver's text after the number.")
    ] = "",
    for_s: ForOption = 600.0,
    clear: ClearOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Raise a test finding on this host, as a rehearsal. It is treated like the findings of its
    detector, and policies really act on it. Its message states that it was injected.
    It ends with --clear, after --for, or with the daemon. Requires [inject] enabled."""
    from tmd import wire
    from tmd.config import load

    settings, about = load(config), _about(entity, gpu, switch)
    if clear and (dry_run or severity is not None or message):
        raise ConfigError("--clear takes only a CODE and an entity: leave out the other options")
    if clear:
        full = _numbered(code, number)
        return _print_ended(_ask(settings, wire.Withdraw(wire.VERSION, full, about)), as_json)
    signal = _signal(settings, code, number, about, severity, message)
    answer = _ask(settings, wire.Inject(wire.VERSION, signal, for_s, dry_run))
    if dry_run:
        return _print_outlook(answer, config, as_json)
    return _print_raised(answer, for_s, as_json)


def _about(entity: str, gpu: str, switch: str) -> str:
    """The named entity; empty if none was named."""
    if not gpu and not switch:
        return entity
    from tmd_detectors.xid.lines import address
    from tmd_detectors.xid.switches import ENTITY

    from tmd.core.values.model import GPU

    if sum(map(bool, (entity, gpu, switch))) > 1:
        raise ConfigError("--gpu, --switch and --entity exclude each other: give one of them")
    place = address(gpu or switch)
    if place is None:
        given = printable(gpu or switch)
        raise ConfigError(f"'{given}' is not a PCI address; write it as 0000:3b:00.0")
    return f"{GPU if gpu else ENTITY}{place}"


def _numbered(code: str, number: int | None) -> str:
    """The code for ``xid 79`` or ``sxid 20034``; other codes unchanged."""
    whole = "xid.sxid" if code == "sxid" else code
    return whole if number is None else f"{whole}.{number}"


def _signal(
    settings: Settings,
    code: str,
    number: int | None,
    about: str,
    severity: Severity | None,
    message: str,
) -> Signal:
    from tmd.core.values.model import Signal

    if not code:
        raise ConfigError("the CODE is missing; for example 'tmd inject nic.down --dry-run'")
    if what := {"xid": "XID", "sxid": "SXid"}.get(code):
        return _of_table(what, settings, number, about, severity, message)
    if number is not None:
        raise ConfigError(f"only 'xid' and 'sxid' take a number, not '{printable(code)}'")
    return Signal(code, about or HOST, severity or Severity.WARNING, message=message)


def _of_table(
    what: str,
    settings: Settings,
    number: int | None,
    about: str,
    severity: Severity | None,
    detail: str,
) -> Signal:
    """The detector's signal for this XID or SXid, by the configured table; of an SXid in a line
    with the severity of the table."""
    from msgspec import structs
    from tmd_detectors.xid.example import first_of_switch, first_signal
    from tmd_detectors.xid.switches import ENTITY

    from tmd.cli.xids import table_of
    from tmd.core.values.model import GPU

    first, begin, verb = (
        (first_of_switch, ENTITY, "tmd xid list --sxid")
        if what == "SXid"
        else (first_signal, GPU, "tmd xid list")
    )
    if number is None or not about.startswith(begin):
        raise ConfigError(_INCOMPLETE[what])
    table = table_of(what, settings)
    if number not in table.rows:
        raise ConfigError(f"{what} {number} is not in the table: '{verb}' shows the known ones")
    signal: Signal | None = first(table, number, about.removeprefix(begin), detail)
    if signal is None:
        raise ConfigError(f"{what} {number} only clears other findings: use --clear")
    return signal if severity is None else structs.replace(signal, severity=severity)


# --- the daemon -----------------------------------------------------------------------------------


def _ask(settings: Settings, request: wire.Request) -> wire.Injected:
    """The answer of this host's daemon.

    Raises:
        TmdError: the daemon refuses, or does not run.
    """
    from tmd import wire

    try:
        answer = wire.decode(_exchange(settings.host.socket, wire.encode(request)))
    except OSError as error:
        raise TmdError(
            f"no daemon answers at {settings.host.socket}: {os_reason(error)}; "
            "is tmd running on this host, and may this user use its socket?"
        ) from None
    if isinstance(answer, wire.Injected):
        return answer
    raise TmdError(answer.reason if isinstance(answer, wire.Rejected) else "unexpected answer")


def _exchange(place: Path, frame: bytes) -> bytes:
    from tmd import wire

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(str(place))
        connection.sendall(frame)
        with connection.makefile("rb") as answers:
            header = answers.read(wire.HEADER_SIZE)
            if len(header) < wire.HEADER_SIZE:
                raise ConnectionError("it closed the connection")
            return answers.read(wire.body_size(header))


# --- output ---------------------------------------------------------------------------------------


def _print_outlook(answer: wire.Injected, config: Path | None, as_json: bool) -> None:
    """What would be decided after the finding's hold time."""
    from msgspec import structs

    from tmd.cli.policies import lines, outlook

    (alert,) = answer.alerts

    async def look(store: RedisStore, settings: Settings) -> dict[str, Any]:
        view = await store.snapshot()
        if view.host(alert.host) is None:
            raise TmdError(f"Redis has no heartbeat of {alert.host} yet: try again shortly")
        before = alert.reached_at - settings.breaker.settle_s
        settled = structs.replace(alert, at=before, worse_at=None)
        return outlook(_with(view, settled), settings)

    found = with_store(config, look)
    if as_json:
        print_json({"alert": alert, "hold_s": answer.hold_s, "off": answer.off, **found})
        return
    say(f"would be raised: {_line(alert)}")
    for line in lines(found):
        say(line)
    if answer.off:
        say(answer.off, err=True)


def _with(view: ClusterView, alert: Alert) -> ClusterView:
    from msgspec import structs

    def merged(known: tuple[Alert, ...]) -> tuple[Alert, ...]:
        key = (alert.detector, alert.code, alert.entity)
        return (*(a for a in known if (a.detector, a.code, a.entity) != key), alert)

    hosts = (
        structs.replace(h, alerts=merged(h.alerts), at=max(h.at, time.time()))
        if h.host == alert.host
        else h
        for h in view.hosts
    )
    return structs.replace(view, hosts=tuple(hosts))


def _print_raised(answer: wire.Injected, for_s: float, as_json: bool) -> None:
    (alert,) = answer.alerts
    if as_json:
        print_json({"alert": alert, "hold_s": answer.hold_s, "for_s": for_s})
        return
    say(f"injected on {alert.host}: {_line(alert)}")
    if answer.hold_s:
        say(f"policies act on it after {answer.hold_s:g} s")
    lasts = f"it clears after {for_s:g} s" if for_s else "it stays until the daemon ends"
    say(f"{lasts}, or with 'tmd inject --clear'")


def _print_ended(answer: wire.Injected, as_json: bool) -> None:
    if as_json:
        print_json({"alerts": answer.alerts})
        return
    for alert in answer.alerts:
        say(f"cleared: {_line(alert)}")


def _line(alert: Alert) -> str:
    words = (alert.severity.value, alert.code, alert.entity, alert.message)
    return "  ".join((*words, f"({alert.strategy.value})"))

"""Verbs about NVIDIA's XIDs and SXids: explain, list. They read the detector's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tmd.cli.common import ConfigOption, JsonOption
from tmd.cli.output import print_json, say
from tmd.core.values.printable import printable

if TYPE_CHECKING:
    from tmd.config import Settings

xid = typer.Typer(
    help="Explain the XIDs of GPUs and the SXids of NVSwitches.", no_args_is_help=True
)

FOLLOWS = {
    "fail": "FATAL: the GPU is unusable; with strategy 'act' its rank is moved now",
    "drain": "DEGRADED: the job survives; with strategy 'act' the rank is handed over soon",
    "alert": "an alert; nothing is moved",
    "note": "a note; nothing is moved",
    "text": "as the text requests: None clears findings, drain is DEGRADED, reset or reboot FATAL",
    "clear": "clears another finding",
}
"""What tmd does for each verdict of the table."""
OTHERS = {
    "A": "Azure NHC fails the node",
    "P": "k8s-device-plugin ignores it",
    "D": "on DCGM's always-on health list",
}


LISTED = {
    "G": "NVIDIA's Fabric Manager user guide",
    "M": "NVIDIA's mapping in NVSentinel",
}
_ELSEWHERE = {
    "XID": "the catalogue of a newer driver",
    "SXid": "the Fabric Manager user guide of a newer driver",
}


@xid.command()
def explain(
    number: Annotated[
        list[str],
        typer.Argument(
            help="79, as in 'NVRM: Xid (PCI:0000:3b:00): 79, …'; or sxid 20034 of an NVSwitch.",
            metavar="[sxid] NUMBER",
        ),
    ],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain an XID or SXid: its meaning, what tmd does, and what the operator should do."""
    from tmd.config import load

    what, wanted = _wanted(number)
    table = table_of(what, load(config))
    row = table.rows.get(wanted)
    if row is None:
        known = f"{what}s {min(table.rows)} to {max(table.rows)} of {table.as_of}"
        say(
            f"tmd: {what} {wanted} is not in the table ({known}); tmd raises an alert and "
            f"moves no rank. Look it up in {_ELSEWHERE[what]}.",
            err=True,
        )
        raise typer.Exit(2)
    facts = _of_switch(row, table.origin) if what == "SXid" else _facts(row, table.origin)
    if as_json:
        print_json(facts)
        return
    say(f"{what} {wanted}: {facts.pop('name' if what == 'SXid' else 'meaning')}")
    del facts[what.lower()]
    for name, value in facts.items():
        if value:
            say(f"  {name.replace('_', ' ') + ':':<18}{value}")


@xid.command("list")
def list_(
    config: ConfigOption = None,
    as_json: JsonOption = False,
    sxid: Annotated[
        bool, typer.Option("--sxid", help="List the errors of NVSwitches instead of GPUs.")
    ] = False,
) -> None:
    """List all XIDs, or all SXids, of the table."""
    from tmd.config import load

    table = table_of("SXid" if sxid else "XID", load(config))
    rows = table.rows.values()
    if as_json:
        print_json([(_of_switch if sxid else _facts)(row, table.origin) for row in rows])
        return
    for row in rows:
        if sxid:
            say(f"{row.sxid:>5}  {row.verdict.value:<6}{row.scope.value:<8}{row.name}")
        else:
            say(f"{row.xid:>4}  {row.verdict.value:<6}{row.kind:<10}{row.meaning}")
    say(f"source: {table.origin}")


def _wanted(words: list[str]) -> tuple[str, int]:
    """``XID`` or ``SXid``, and the number."""
    *kind, number = words
    what = {(): "XID", ("xid",): "XID", ("sxid",): "SXid"}.get(tuple(w.lower() for w in kind))
    if what is None or not (number.isascii() and number.isdigit() and len(number) <= 9):
        given = printable(" ".join(words))
        raise typer.BadParameter(f"'{given}' is neither NUMBER nor 'sxid NUMBER'")
    return what, int(number)


def table_of(what: str, settings: Settings) -> Any:
    """The configured table of ``XID`` or ``SXid``."""
    from tmd_detectors.xid import sxids, table

    module, key = (sxids, "sxid_table") if what == "SXid" else (table, "table")
    return module.load(settings.detector("xid").own.get(key) or None)


def _of_switch(row: Any, origin: str) -> dict[str, Any]:
    """The facts about one SXid, for people and programs."""
    verdict = row.verdict.value
    cases = []
    if verdict == "fail":
        cases.append("the line does not have Fatal: an alert; nothing is moved")
    elif row.fatal.value == "no" and verdict == "note":
        cases.append("the line has Fatal: an alert; nothing is moved")
    if row.cancels is not None:
        cases.append(f"clears SXid {row.cancels} of the same switch")
    fail = (
        "FATAL: with strategy 'act' the ranks of this host, whose GPUs share the fabric, are moved"
    )
    ends = "after quiet_s without another"
    return {
        "sxid": row.sxid,
        "name": row.name,
        "fatal": row.fatal.value,
        "scope": row.scope.value,
        "verdict": verdict,
        "tmd": fail if verdict == "fail" else FOLLOWS[verdict],
        "tmd_in_cases": "; ".join(cases),
        "operator": row.action,
        "ends": {"fail": "on a new boot, or by an operator", "clear": ""}.get(verdict, ends),
        "listed_by": "; ".join(LISTED.get(letter, letter) for letter in row.sources),
        "source": origin,
    }


def _facts(row: Any, origin: str) -> dict[str, Any]:
    """The facts about one row, for people and programs."""
    return {
        "xid": row.xid,
        "meaning": row.meaning,
        "class": row.kind,
        "verdict": row.verdict.value,
        "tmd": FOLLOWS[row.verdict.value],
        "tmd_in_cases": "; ".join(_cases(row)),
        "operator": row.action,
        "ends": _ends(row),
        "migrate": row.migrate,
        "catalogue": row.catalogue or "no bucket",
        "others": "; ".join(_others(row)),
        "source": origin,
    }


def _others(row: Any) -> list[str]:
    level = [f"gpud: {row.gpud}"] if row.gpud else []
    return level + [OTHERS.get(letter, letter) for letter in row.others]


def _cases(row: Any) -> list[str]:
    found = []
    for number, verdict in row.by_subcode().items():
        found.append(f"sub-code {number} of a link event: {verdict.value}")
    if row.symptom:
        found.append("within 5 s of another XID of the same GPU: counted as part of that one")
    if row.fatal is not None:
        found.append(f"the line has fatal or link down: {row.fatal.value}")
    for times, verdict in (("second", row.second), ("third", row.third)):
        if verdict is not None:
            found.append(f"{times} process on the same GPU within 24 h: {verdict.value}")
    if row.cancels is not None:
        found.append(f"clears XID {row.cancels} of the same GPU")
    return found


def _ends(row: Any) -> str:
    if row.verdict.value in ("alert", "note") and row.second is None and row.fatal is None:
        return "after quiet_s without another"
    if row.until == "boot":
        return "on a new boot, or by an operator"
    return "" if row.verdict.value == "clear" else "on XID 154 None, or on a new boot"

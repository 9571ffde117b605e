"""Verbs about NVIDIA's XID numbers: explain, list. They read the table that the detector uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tmd.cli.common import ConfigOption, JsonOption

if TYPE_CHECKING:
    from pathlib import Path

xid = typer.Typer(help="Explain the XID numbers of the NVIDIA driver.", no_args_is_help=True)

FOLLOWS = {
    "fail": "FATAL: the GPU cannot go on; with strategy 'act' its rank is moved now",
    "drain": "DEGRADED: the job survives; with strategy 'act' the rank is handed over in good time",
    "alert": "an alert; nothing is moved",
    "note": "a note; nothing is moved",
    "text": "what the text asks for: None ends findings, drain is DEGRADED, reset or reboot FATAL",
    "clear": "the end of another finding",
}
"""What tmd does about a verdict of the table."""
OTHERS = {
    "A": "Azure NHC fails the node",
    "P": "k8s-device-plugin ignores it",
    "D": "on DCGM's always-on health list",
}


@xid.command()
def explain(
    number: Annotated[int, typer.Argument(help="As in 'NVRM: Xid (PCI:0000:3b:00): 79, …'.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """What XID NUMBER means, what tmd does about it, and what the operator should do."""
    table = _table(config)
    row = table.rows.get(number)
    if row is None:
        known = f"XIDs {min(table.rows)} to {max(table.rows)} of {table.as_of}"
        typer.echo(
            f"tmd: XID {number} is not in the table ({known}); tmd raises an alert for it and "
            "moves nothing. Look it up in the catalogue of a newer driver.",
            err=True,
        )
        raise typer.Exit(2)
    facts = _facts(row, table.origin)
    if as_json:
        import json

        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    typer.echo(f"XID {number}: {facts.pop('meaning')}")
    del facts["xid"]
    for name, value in facts.items():
        if value:
            typer.echo(f"  {name.replace('_', ' ') + ':':<18}{value}")


@xid.command("list")
def list_(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """All XIDs of the table."""
    table = _table(config)
    if as_json:
        import json

        facts = [_facts(row, table.origin) for row in table.rows.values()]
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    for row in table.rows.values():
        typer.echo(f"{row.xid:>4}  {row.verdict.value:<6}{row.kind:<10}{row.meaning}")
    typer.echo(f"source: {table.origin}")


def _table(config: Path | None) -> Any:
    from tmd_detectors.xid.table import load as load_table

    from tmd.config import load

    return load_table(load(config).detector("xid").own.get("table") or None)


def _facts(row: Any, origin: str) -> dict[str, Any]:
    """What people and programs are told of one row."""
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
    if row.symptom:
        found.append("within 5 s of another XID of the same GPU: counted as part of that one")
    if row.fatal is not None:
        found.append(f"the line says fatal or link down: {row.fatal.value}")
    for times, verdict in (("second", row.second), ("third", row.third)):
        if verdict is not None:
            found.append(f"{times} process on the same GPU within 24 h: {verdict.value}")
    if row.cancels is not None:
        found.append(f"ends XID {row.cancels} of the same GPU")
    return found


def _ends(row: Any) -> str:
    if row.verdict.value in ("alert", "note") and row.second is None and row.fatal is None:
        return "when it was not seen for quiet_s"
    if row.until == "boot":
        return "with a new boot, or by an operator"
    return "" if row.verdict.value == "clear" else "with XID 154 None, or with a new boot"

"""The codes of alerts that tmd raises, read from the code, and the tables of XIDs and SXids."""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("detectors", "tmd/core/alerts", "tmd/core/planning/readiness.py", "tmd/daemon")
FAMILIES = "breaker|detector|exec|host|job|nic|nvml|policy|standby|store|straggler|trainer|xid"
CODE = re.compile(rf"(?:{FAMILIES})\.[a-z_]+")
NO_CODES = {"host.silent", "xid.csv", "xid.json"}
"""Texts of that form which name a cause of a plan, a file or nothing that is raised."""
PATTERNS = {"exec.NAME": "a check of your own", "xid.N": "an XID", "xid.sxid.N": "an SXid"}
"""Codes with a part that is not known beforehand."""


def raised() -> set[str]:
    """Every code that can be raised; a code with a variable part by its pattern."""
    return {code for text in _texts() if (code := text) and CODE.fullmatch(text)} - NO_CODES | {
        *_of_ports(),
        *_of_memory(),
        *PATTERNS,
    }


def _files() -> Iterator[Path]:
    for source in SOURCES:
        place = ROOT / source
        yield from [place] if place.is_file() else sorted(place.rglob("*.py"))


def _texts() -> Iterator[str]:
    for file in _files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _of_ports() -> set[str]:
    """Codes of the detector of ports, which joins them from a prefix and a name."""
    from tmd_detectors.nic.counters import REPEATED, RULES, SATURATED
    from tmd_detectors.nic.judge import GONE, NODES
    from tmd_detectors.nic.links import DOWN, DROP, FLAP, SLOW

    own = (GONE, NODES, DOWN, DROP, FLAP, SLOW, REPEATED, SATURATED)
    return {f"nic.{name}" for name in (*own, *RULES)}


def _of_memory() -> set[str]:
    from tmd_detectors.nvml.judge import MEMORY_FACTS

    return {f"nvml.{name}" for name in MEMORY_FACTS}


def _rows(name: str) -> list[dict[str, str]]:
    lines = (ROOT / "detectors" / "xid" / name).read_text().splitlines()
    found = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [{key: (value or "").replace("|", "\\|") for key, value in row.items()} for row in found]


def xids() -> str:
    """A row for each XID of the shipped table."""
    return _table("xid.csv", "xid", "meaning")


def sxids() -> str:
    """A row for each SXid of the shipped table."""
    return _table("sxid.csv", "sxid", "name")


def _table(file: str, number: str, meaning: str) -> str:
    rows = [
        f"| `{r[number]}` | {r[meaning]} | {r['verdict']} | {r['action']} |" for r in _rows(file)
    ]
    head = [f"| {number.upper()} | meaning | verdict | what you do |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])

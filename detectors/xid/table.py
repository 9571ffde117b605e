"""The XID table: what each number means and what may follow it. Data, never code.

The shipped ``xid.csv`` states its source and date in its first lines; a site may name a file of its
own in the same format, which then stands instead of it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from enum import StrEnum
from importlib.resources import files
from pathlib import Path

from msgspec import Struct, ValidationError, convert, field

from tmd.plugin import PluginError

SHIPPED = "xid.csv"


class Verdict(StrEnum):
    """What may follow an XID."""

    FAIL = "fail"  # the GPU cannot go on: move its rank now
    DRAIN = "drain"  # the job survives: hand the rank over in good time
    ALERT = "alert"  # tell people, move nothing
    NOTE = "note"  # keep for the record
    TEXT = "text"  # XID 154: what its text says
    CLEAR = "clear"  # ends another one


class Row(Struct, frozen=True, forbid_unknown_fields=True):
    """One XID."""

    xid: int
    meaning: str
    verdict: Verdict
    catalogue: str = ""
    """NVIDIA's bucket of immediate actions; empty where its catalogue has none."""
    gpud: str = ""
    """Level and chain of actions of gpud."""
    others: str = ""
    """Who else has a rule for it; the letters are explained in the file."""
    kind: str = field(default="", name="class")
    """APP, INFO, WATCH, CONTEXT, PLANNED, LINK, FATAL, RMA, DIRECTIVE, CONFIG, RECOVER, UNUSED."""
    action: str = ""
    """What the operator should do."""
    migrate: str = ""
    """The rule behind ``verdict`` in words."""
    fatal: Verdict | None = None
    """Instead of ``verdict``, if the line itself says fatal or link down."""
    second: Verdict | None = None
    """Instead, once two different processes met it on one GPU within 24 hours."""
    third: Verdict | None = None
    """Instead, once three did."""
    until: str = ""
    """``boot``: only a new boot or an operator ends it; else also XID 154 with None."""
    cancels: int | None = None
    """The XID that this one ends."""

    @property
    def symptom(self) -> bool:
        """Says something only beside another XID of the same GPU."""
        return self.kind == "CONTEXT"


class Table(Struct, frozen=True):
    rows: Mapping[int, Row]
    source: str
    as_of: str

    @property
    def origin(self) -> str:
        """Source and date, for people."""
        return f"{self.source} ({self.as_of})"


def load(file: str | Path | None = None) -> Table:
    """The table in ``file``, or the shipped one.

    Raises:
        PluginError: it cannot be read, a row is wrong, or it does not say source and date.
    """
    name = str(file) if file is not None else SHIPPED
    try:
        place = Path(file) if file is not None else files(__package__) / SHIPPED
        return parse(place.read_text(encoding="utf-8").splitlines(), name)
    except (OSError, UnicodeDecodeError) as error:
        raise PluginError(f"XID table {name}: {error}") from None


def parse(lines: Iterable[str], name: str) -> Table:
    """See :func:`load`; ``name`` is for the errors."""
    facts: dict[str, str] = {}
    data = []
    for line in lines:
        if line.startswith("#"):
            key, _, value = line[1:].partition(":")
            facts[key.strip()] = value.strip()
        else:
            data.append(line)
    rows: dict[int, Row] = {}
    for values in csv.DictReader(data):
        try:
            given = {str(k): v for k, v in values.items() if v}
            row = convert(given, Row, strict=False)
        except ValidationError as error:
            raise PluginError(f"XID table {name}: XID {values.get('xid')}: {error}") from None
        if row.xid in rows:
            raise PluginError(f"XID table {name}: XID {row.xid} stands there twice")
        rows[row.xid] = row
    if not (rows and facts.get("source") and facts.get("as_of")):
        raise PluginError(
            f"XID table {name}: it needs rows and the lines '# source: …' and '# as_of: …'"
        )
    return Table(rows=rows, source=facts["source"], as_of=facts["as_of"])

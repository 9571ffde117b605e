"""The XID table: what each number means and what may follow it. Data, never code.

The shipped ``xid.csv`` states its source and date in its first lines; a site may name a file of its
own in the same format, which then stands instead of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from msgspec import Struct, field

from . import sheet

SHIPPED = "xid.csv"


class XidVerdict(StrEnum):
    """What may follow an XID."""

    FAIL = "fail"  # the GPU cannot go on: move its rank now
    DRAIN = "drain"  # the job survives: hand the rank over in good time
    ALERT = "alert"  # tell people, move nothing
    NOTE = "note"  # keep for the record
    TEXT = "text"  # XID 154: what its text says
    CLEAR = "clear"  # ends another one


class XidRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One XID."""

    xid: int
    meaning: str
    verdict: XidVerdict
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
    fatal: XidVerdict | None = None
    """Instead of ``verdict``, if the line itself says fatal or link down."""
    second: XidVerdict | None = None
    """Instead, once two different processes met it on one GPU within 24 hours."""
    third: XidVerdict | None = None
    """Instead, once three did."""
    until: str = ""
    """``boot``: only a new boot or an operator ends it; else also XID 154 with None."""
    cancels: int | None = None
    """The XID that this one ends."""
    subcodes: str = ""
    """``38=alert 40=alert``: instead of all other columns, for these sub-codes of NVLink5."""

    def __post_init__(self) -> None:
        self.by_subcode()  # a wrong one is an error of the table, told when it is read

    def by_subcode(self) -> dict[int, XidVerdict]:
        """Verdicts by sub-code."""
        pairs = (word.partition("=") for word in self.subcodes.split())
        return {int(number): XidVerdict(verdict) for number, _, verdict in pairs}

    @property
    def symptom(self) -> bool:
        """Says something only beside another XID of the same GPU."""
        return self.kind == "CONTEXT"


class XidTable(sheet.Sheet, frozen=True):
    rows: Mapping[int, XidRow]


def load(file: str | Path | None = None) -> XidTable:
    """The table in ``file``, or the shipped one.

    Raises:
        PluginError: it cannot be read, a row is wrong, or it does not say source and date.
    """
    return parse(*sheet.text(file, SHIPPED, "XID"))


def parse(lines: Iterable[str], name: str) -> XidTable:
    """See :func:`load`; ``name`` is for the errors."""
    rows, facts = sheet.rows(lines, XidRow, "xid", "XID", name)
    return XidTable(rows=rows, source=facts.source, as_of=facts.as_of)

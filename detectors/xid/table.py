"""The XID table: what each number means and what may follow. Data, never code.

The shipped ``xid.csv`` states its source and date in its first lines. A site may name its own file
in the same format, which replaces it.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial

from msgspec import Struct, field

from . import sheet


class XidVerdict(StrEnum):
    """What may follow an XID."""

    FAIL = "fail"  # the GPU is unusable: move its rank now
    DRAIN = "drain"  # the job survives: hand the rank over soon
    ALERT = "alert"  # alert people, move nothing
    NOTE = "note"  # keep for the record
    TEXT = "text"  # XID 154: its text decides
    CLEAR = "clear"  # clears another one


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
    """Other tools with a rule for it; the letters are explained in the file."""
    kind: str = field(default="", name="class")
    """APP, INFO, WATCH, CONTEXT, PLANNED, LINK, FATAL, RMA, DIRECTIVE, CONFIG, RECOVER, UNUSED."""
    action: str = ""
    """What the operator should do."""
    migrate: str = ""
    """The rule behind ``verdict`` in words."""
    fatal: XidVerdict | None = None
    """Replaces ``verdict`` if the line itself states fatal or link down."""
    second: XidVerdict | None = None
    """Replaces it once two different processes met it on one GPU within 24 hours."""
    third: XidVerdict | None = None
    """Replaces it once three did."""
    until: str = ""
    """``boot``: only a new boot or an operator clears it; otherwise XID 154 with None does, too."""
    cancels: int | None = None
    """The XID that this one clears."""
    subcodes: str = ""
    """``38=alert 40=alert``: replaces all other columns for these sub-codes of NVLink5."""

    def __post_init__(self) -> None:
        self.by_subcode()  # an invalid one is reported when the table is read

    def by_subcode(self) -> dict[int, XidVerdict]:
        """Verdicts by sub-code."""
        pairs = (word.partition("=") for word in self.subcodes.split())
        return {int(number): XidVerdict(verdict) for number, _, verdict in pairs}

    @property
    def symptom(self) -> bool:
        """Whether it matters only beside another XID of the same GPU."""
        return self.kind == "CONTEXT"


XidTable = sheet.Sheet[XidRow]
load = partial(sheet.load, XidRow, "XID")
"""``load(file)``: the table in ``file``, or the shipped one. See :func:`sheet.load`."""
parse = partial(sheet.parse, XidRow, "XID")
"""``parse(lines, name)``: the table in ``lines``."""

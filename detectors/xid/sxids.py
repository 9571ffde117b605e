"""The table of SXids: what each error number of an NVSwitch means. Data, never code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from . import sheet
from .table import XidVerdict

SHIPPED = "sxid.csv"


class Fatality(StrEnum):
    """How much of the fabric the error ends."""

    NO = "no"
    FATAL = "fatal"  # the port, and the GPUs that use it
    ALWAYS = "always"  # the whole fabric of the host


class SxidScope(StrEnum):
    """What the error is about."""

    LINK = "link"
    SWITCH = "switch"
    OTHER = "other"


class SxidRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One SXid."""

    sxid: int
    name: str
    fatal: Fatality
    scope: SxidScope
    verdict: XidVerdict
    """``fail`` counts only if the line itself has Fatal, else it is ``alert``."""
    action: str = ""
    """What the operator should do."""
    sources: str = ""
    """Sources that list the number; the letters are explained in the file."""
    cancels: int | None = None
    """The SXid of the same switch that this one clears."""

    def __post_init__(self) -> None:
        if self.verdict in (XidVerdict.DRAIN, XidVerdict.TEXT):
            raise ValueError(f"an SXid has no verdict {self.verdict.value}")
        if self.verdict is XidVerdict.FAIL and self.fatal is Fatality.NO:
            raise ValueError("only a fatal SXid can have the verdict fail")


class SxidTable(sheet.Sheet, frozen=True):
    rows: Mapping[int, SxidRow]


def load(file: str | Path | None = None) -> SxidTable:
    """The table in ``file``, or the shipped one.

    Raises:
        PluginError: it cannot be read, a row is invalid, or it lacks source and date.
    """
    return parse(*sheet.text(file, SHIPPED, "SXid"))


def parse(lines: Iterable[str], name: str) -> SxidTable:
    """See :func:`load`; ``name`` is for the errors."""
    rows, facts = sheet.rows(lines, SxidRow, "sxid", "SXid", name)
    return SxidTable(rows=rows, source=facts.source, as_of=facts.as_of)

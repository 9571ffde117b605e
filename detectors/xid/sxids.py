"""The table of SXids: what each error number of an NVSwitch means. Data, never code."""

from __future__ import annotations

from enum import StrEnum
from functools import partial

from msgspec import Struct

from . import sheet
from .table import XidVerdict


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


SxidTable = sheet.Sheet[SxidRow]
load = partial(sheet.load, SxidRow, "SXid")
"""``load(file)``: the table in ``file``, or the shipped one. See :func:`sheet.load`."""
parse = partial(sheet.parse, SxidRow, "SXid")
"""``parse(lines, name)``: the table in ``lines``."""

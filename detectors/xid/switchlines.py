"""Parses lines of the NVSwitch driver. Pure, and linear in the length of the line.

One error comes as up to three lines: the report (``20034, Fatal, Link 63 LTSSM Fault Up``), then
``Severity 1 Engine instance 63 …`` and ``Data {0x…}``. The last two only describe the first.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from .lines import address, number, untimed

MARK = "nvidia-nvswitch"
_LONGEST = 500


class StatedSeverity(StrEnum):
    """The severity that the line itself states."""

    FATAL = "fatal"
    NONFATAL = "non-fatal"
    NOTHING = "nothing"


_WORDS = {
    "fatal": StatedSeverity.FATAL,
    "non-fatal": StatedSeverity.NONFATAL,
    "nonfatal": StatedSeverity.NONFATAL,
}


class SwitchFault(Struct, frozen=True):
    """One SXid on one NVSwitch."""

    pci: str
    """``0000:05:00.0``"""
    sxid: int
    stated: StatedSeverity = StatedSeverity.NOTHING
    link: int | None = None
    detail: str = ""
    """The text after number and severity."""
    line: str = ""
    follows: bool = False
    """The line only describes an error that another line reports."""


def read(text: str) -> SwitchFault | None:
    """The error that ``text`` reports or describes; ``None`` for any other text."""
    body = untimed(text)
    name, found, rest = body.partition(": SXid")
    instance = name.removeprefix(MARK)
    if not found or instance == name or not (instance.isdigit() or not instance):
        return None
    place, closed, report = rest.removeprefix(":").lstrip().partition("):")
    pci = address(place.removeprefix("(").removeprefix("PCI:")) if place[:1] == "(" else None
    code, _, detail = report.partition(",")
    sxid = number(code.strip())
    if not closed or pci is None or sxid is None:
        return None
    return _fault(pci, sxid, detail.strip(), text[:_LONGEST])


def _fault(pci: str, sxid: int, detail: str, line: str) -> SwitchFault:
    word, _, rest = detail.partition(",")
    stated = _WORDS.get(word.strip().lower())
    if stated is not None:
        detail = rest.strip()
        return SwitchFault(pci, sxid, stated, _link(detail), detail[:_LONGEST], line)
    follows = detail.startswith(("Severity ", "Data {"))
    return SwitchFault(
        pci, sxid, StatedSeverity.NOTHING, _link(detail), detail[:_LONGEST], line, follows
    )


def _link(detail: str) -> int | None:
    first, _, rest = detail.partition(" ")
    return number(rest.partition(" ")[0]) if first == "Link" else None

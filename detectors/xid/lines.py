"""Parses lines of the NVIDIA driver. Pure, and linear in the length of the line.

Drivers have used these forms: with and without ``PCI:``, a MIG instance after the bus id, with and
without a process, the fields of NVLink5, and texts about a lost GPU without a number.
"""

from __future__ import annotations

from itertools import pairwise

from msgspec import Struct, structs

PREFIX = "NVRM: "
LOST = 79
"""GPU has fallen off the bus: also reported by texts without a number."""
DIFFERENT = 64
"""Number of lines that are remembered."""
LOST_TEXT = "fallen off the bus"
_BARE_LOST = ("GPU has fallen off the bus", "GPU has fallen off the bus.")
"""Texts that the driver also writes without its prefix."""
_AT = "GPU at PCI:"
_LONGEST_STAMP = 24
_HEX = frozenset("0123456789abcdef")
_LONGEST = 500
_FATAL_WORDS = frozenset({"fatal"})
_DOWN = ("link down", "link_down", "link is down")


class XidLine(Struct, frozen=True):
    """One XID on one GPU."""

    pci: str
    """``0000:3b:00.0``; the log omits the function, which is 0 for a GPU."""
    xid: int
    at: float
    """Seconds since boot."""
    pid: int | None = None
    process: str = ""
    instance: str = ""
    """MIG: ``GPU-I:05``."""
    detail: str = ""
    """The text after number and process."""
    line: str = ""


NVLINK5 = range(144, 151)
"""XIDs whose lines have the fields of NVLink5."""


class NvlinkLine(Struct, frozen=True):
    """NVLink5 (:data:`NVLINK5`): ``UNIT Fatal XC0 i0 Link 08 (0x… 0x… …)``."""

    unit: str
    fatal: bool
    number: int | None
    words: tuple[int, ...]
    """The first is the interrupt information, the second the error status."""

    @property
    def subcode(self) -> int | None:
        """Bits 20 to 25 of the first word, as in all driver versions."""
        return self.words[0] >> 20 & 0x3F if self.words else None


class XidLineReader:
    """Parses lines into faults. Remembers one line, as the text of a lost GPU may span three, and
    some parsed lines: in a storm few are different."""

    def __init__(self) -> None:
        self._known: dict[str, XidLine | None] = {}
        self._named = ""
        self._left = 0

    def take(self, text: str, at: float) -> XidLine | None:
        line = untimed(text)
        body = line.removeprefix(PREFIX)
        if body == line and not (line.startswith("GPU ") and line.endswith(_BARE_LOST)):
            return None
        if body.startswith("Xid ("):
            return self._xid(body, text, at)
        if body.startswith("The NVIDIA GPU ") and len(body.split(maxsplit=4)) > 3:
            self._named, self._left = address(body.split(maxsplit=4)[3]) or "", 3
        elif body.startswith(_AT):
            self._named, self._left = _of_gpu(body) or "", 3
        elif self._left:
            self._left -= 1
        if LOST_TEXT not in body:
            return None
        own = _of_gpu(body)
        pci = own or (self._named if self._left else "")
        self._left = 0 if own is None else self._left
        if not pci:
            return None
        return XidLine(pci=pci, xid=LOST, at=at, detail="text without an XID", line=text[:_LONGEST])

    def _xid(self, body: str, text: str, at: float) -> XidLine | None:
        if text not in self._known:
            if len(self._known) >= DIFFERENT:
                self._known.clear()
            self._known[text] = _xid(body, text, at)
        known = self._known[text]
        return None if known is None else structs.replace(known, at=at)


def _xid(body: str, text: str, at: float) -> XidLine | None:
    place, closed, rest = body[len("Xid (") :].partition("): ")
    words = place.split()
    pci = address(words[0].removeprefix("PCI:")) if words else None
    code, _, rest_of_line = rest.partition(",")
    xid = number(code.strip())
    if not closed or pci is None or xid is None:
        return None
    pid, process, detail = _process(rest_of_line.strip())
    instance = next((w for w in words[1:] if w.startswith("GPU-I:")), "")
    return XidLine(pci, xid, at, pid, process, instance, detail[:_LONGEST], text[:_LONGEST])


def _of_gpu(body: str) -> str | None:
    """The address in ``GPU 0000:18:00.0: …``, ``GPU 18:00.0: …``, ``GPU at PCI:0000:18:00: …``."""
    if not body.startswith("GPU "):
        return None
    place, found, _ = body.removeprefix(_AT).removeprefix("GPU ").partition(": ")
    return address(place) if found else None


def _process(rest_of_line: str) -> tuple[int | None, str, str]:
    if not rest_of_line.startswith("pid="):
        return None, "", rest_of_line
    pid, _, rest = rest_of_line.removeprefix("pid=").partition(", ")
    process = ""
    if rest.startswith("name="):
        process, _, rest = rest.removeprefix("name=").partition(", ")
    known = "" if "<unknown>" in process else process[:64]
    return number(pid.strip("'\" ,")), known, rest


def link(fault: XidLine) -> NvlinkLine | None:
    """The NVLink5 fields of ``fault``, if it is such a fault and its line has their form."""
    if fault.xid not in NVLINK5:
        return None
    head, opened, words = fault.detail.partition("(")
    names = head.split()
    if not opened or len(names) < 2 or names[1].lower() not in ("fatal", "nonfatal", "non-fatal"):
        return None
    after = dict(pairwise(names)).get("Link", "")
    values = [_hexadecimal(w) for w in words.partition(")")[0].replace(",", " ").split()[:16]]
    return NvlinkLine(
        unit=names[0],
        fatal=names[1].lower() == "fatal",
        number=number(after),
        words=tuple(v for v in values if v is not None) if None not in values else (),
    )


def says_fatal(fault: XidLine) -> bool:
    """Whether the line itself calls the fault fatal, or the link down."""
    decoded = link(fault)
    if decoded is not None:
        return decoded.fatal
    text = fault.detail.lower()
    return not _FATAL_WORDS.isdisjoint(text.split()) or any(words in text for words in _DOWN)


def untimed(text: str) -> str:
    """``text`` without the time that a log may print before it: ``[  12.345678] ``."""
    stamp, closed, _ = text[: _LONGEST_STAMP + 2].partition("] ")
    digits = stamp.removeprefix("[").lstrip(" ").replace(".", "", 1)
    timed = closed and text.startswith("[") and digits.isascii() and digits.isdigit()
    return text[len(stamp) + 2 :] if timed else text


def address(place: str) -> str | None:
    """``0000:3b:00.0`` for any way to write it: with NVML's eight digits of domain, or none."""
    parts = place.lower().partition(".")[0].split(":")
    if len(parts) == 2:
        parts.insert(0, "0")
    if len(parts) != 3 or not all(p and len(p) <= 8 and _HEX.issuperset(p) for p in parts):
        return None
    domain, bus, device = (int(p, 16) for p in parts)
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def number(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 9 else None


def _hexadecimal(word: str) -> int | None:
    digits = word.lower().removeprefix("0x")
    return int(digits, 16) if digits and len(digits) <= 16 and _HEX.issuperset(digits) else None

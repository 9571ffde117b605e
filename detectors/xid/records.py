"""One record of ``/dev/kmsg`` as a value (Linux, Documentation/ABI/testing/dev-kmsg)."""

from __future__ import annotations

from msgspec import Struct

KERNEL = 0
"""The facility of the kernel itself. What user space writes gets another one, so nobody who may
write to the log can fake a line of the driver."""
_HEX = frozenset("0123456789abcdefABCDEF")


class Record(Struct, frozen=True):
    facility: int
    seq: int
    """Number of the record in this boot, without gaps at the writer."""
    at: float
    """Seconds since boot."""
    text: str
    """The message without its continuation lines, with escapes resolved."""


def parse(raw: bytes) -> Record | None:
    """``prefix,seq,usec,flags[,…];text`` and indented lines; ``None`` if it is nothing like it."""
    head, found, rest = raw.partition(b";")
    fields = head.split(b",", 3)
    if not found or len(fields) < 4:
        return None
    numbers = [_number(f) for f in fields[:3]]
    if None in numbers:
        return None
    prefix, seq, micros = (n or 0 for n in numbers)
    return Record(facility=prefix >> 3, seq=seq, at=micros / 1e6, text=_text(rest))


def _number(field: bytes) -> int | None:
    # No sign, no blank, and short enough for the kernel's 64 bits.
    return int(field) if field.isdigit() and len(field) <= 20 else None


def _text(rest: bytes) -> str:
    message = rest.partition(b"\n")[0]  # what follows are KEY=value lines of the same record
    parts = message.decode("utf-8", "replace").split("\\x")
    return parts[0] + "".join(map(_unescaped, parts[1:]))


def _unescaped(part: str) -> str:
    """``part`` followed a ``\\x``: two hexadecimal digits stand for one character."""
    digits = part[:2]
    if len(digits) == 2 and _HEX.issuperset(digits):
        return chr(int(digits, 16)) + part[2:]
    return "\\x" + part

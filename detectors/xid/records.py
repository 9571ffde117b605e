"""One record of ``/dev/kmsg`` as a value (Linux, Documentation/ABI/testing/dev-kmsg)."""

from __future__ import annotations

from msgspec import Struct

KERNEL = 0
"""The facility of the kernel itself. User space gets another one, so no process that may write to
the log can fake a line of the driver."""
_HEX = frozenset("0123456789abcdefABCDEF")


class Record(Struct, frozen=True):
    facility: int
    seq: int
    """Number of the record in this boot, without gaps at the writer."""
    at: float
    """Seconds since boot."""
    body: bytes
    """The message as received, with its continuation lines."""

    @property
    def text(self) -> str:
        """The message without its continuation lines, with escapes resolved."""
        message = self.body.partition(b"\n")[0]
        parts = message.decode("utf-8", "replace").split("\\x")
        return parts[0] + "".join(map(_unescaped, parts[1:]))


def parse(raw: bytes) -> Record | None:
    """``prefix,seq,usec,flags[,…];text`` and indented lines; ``None`` if it has another form."""
    head, found, body = raw.partition(b";")
    fields = head.split(b",", 3)
    if not found or len(fields) < 4:
        return None
    prefix, seq, micros, _ = fields
    # No sign, no space, and short enough for the kernel's 64 bits.
    if len(head) > 200 or not (prefix.isdigit() and seq.isdigit() and micros.isdigit()):
        return None
    return Record(int(prefix) >> 3, int(seq), int(micros) / 1e6, body)


def _unescaped(part: str) -> str:
    """``part`` followed a ``\\x``: two hexadecimal digits stand for one character."""
    digits = part[:2]
    if len(digits) == 2 and _HEX.issuperset(digits):
        return chr(int(digits, 16)) + part[2:]
    return "\\x" + part

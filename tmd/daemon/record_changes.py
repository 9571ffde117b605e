"""Finds and applies the difference between the texts of two revisions of a record. Pure.

The record of a job of 16,384 ranks is several megabytes long, but a revision changes a few hundred
bytes of it or copies a membership. A *change* is a list of pieces: copies of parts of the old text,
and new bytes. The caller must check the result: any client of Redis may have written the change.
"""

from __future__ import annotations

import msgspec

from tmd.core.values.decode_errors import UNREADABLE

BLOCK = 128
"""Bytes. The old text is indexed in blocks of this size. A larger one makes the index smaller and
the changes longer."""
LONGEST_CHANGE = 65_536
"""Bytes. The store's scripts never send a change longer than this."""
LONGEST_TEXT = 16_777_216
"""Bytes, about three times the record of a job of 16,384 ranks in a move. The store's scripts never
send a value longer than this."""
COPY_BYTES = 11
"""An encoded copy is at most this long."""

Copy = tuple[int, int]
"""Where a piece begins in the old text, and its length."""
_Parts = list[Copy | bytes]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Parts)


def difference(old: bytes, new: bytes) -> bytes | None:
    """The change from ``old`` to ``new``; ``None`` if it would be longer than half of ``new``, or
    than :data:`LONGEST_CHANGE`.

    Time is linear in both lengths. The search stops once the change exceeds the limit.
    """
    limit = min(len(new) // 2, LONGEST_CHANGE)
    starts = range(len(old) // BLOCK * BLOCK - BLOCK, -1, -BLOCK)
    index = {old[at : at + BLOCK]: at for at in starts}  # backwards: the first of equal ones counts
    parts: _Parts = []
    done = shift = spent = 0
    at = 0
    while at <= len(new) - BLOCK and spent + at - done <= limit:
        found = index.get(new[at : at + BLOCK])
        if found is None:
            at += 1
            continue
        # A block may occur at several offsets. The offset right after the previous copy often gives
        # the longest match, so both are tried.
        begin, length = max(
            ((place, _alike(old, place, new, at)) for place in {found, max(0, at - shift)}),
            key=lambda piece: piece[1],
        )
        while at > done and begin > 0 and old[begin - 1] == new[at - 1]:
            begin, at, length = begin - 1, at - 1, length + 1
        if at > done:
            parts.append(new[done:at])
        spent += at - done + COPY_BYTES
        parts.append((begin, length))
        at = done = at + length
        shift = at - (begin + length)
    if done < len(new):
        parts.append(new[done:])
    change = _encoder.encode(parts)
    return change if len(change) <= limit else None


def applied(old: bytes, change: bytes) -> bytes | None:
    """The result of applying ``change`` to ``old``. ``None`` if a copy lies outside ``old``, or the
    result is longer than :data:`LONGEST_TEXT`."""
    try:
        parts = _decoder.decode(change)
    except UNREADABLE:
        return None
    sizes = [len(part) if isinstance(part, bytes) else part[1] for part in parts]
    if min(sizes, default=0) < 0 or sum(sizes) > LONGEST_TEXT:
        return None
    copies = (part for part in parts if not isinstance(part, bytes))
    if any(not 0 <= begin <= len(old) - length for begin, length in copies):
        return None
    return b"".join(p if isinstance(p, bytes) else old[p[0] : p[0] + p[1]] for p in parts)


def _alike(old: bytes, begin: int, new: bytes, at: int) -> int:
    """How many bytes of ``old`` from ``begin`` are those of ``new`` from ``at``."""
    longest = min(len(old) - begin, len(new) - at)
    length, step = 0, BLOCK
    while step and length < longest:
        end = min(length + step, longest)
        if old[begin + length : begin + end] == new[at + length : at + end]:
            length, step = end, 2 * step
        else:
            step //= 2
    return length

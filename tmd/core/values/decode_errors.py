"""Exceptions of decoding with msgspec, and a short text for them.

Not in :mod:`tmd.core.values.errors`, which processes without installed packages import.
"""

from __future__ import annotations

import msgspec

from tmd.core.values.reasons import in_words

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec raises for malformed bytes."""
LONGEST = 200


def brief(error: object) -> str:
    """The text of ``error``, cut short: it may quote bytes of an unknown peer."""
    text = in_words(error) if isinstance(error, BaseException) else str(error)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

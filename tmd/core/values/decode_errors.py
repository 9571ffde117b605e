"""Bytes that are no value of the type that was asked for: what decoding raises, and what is said.

Not in :mod:`tmd.core.values.errors`, which processes import that have nothing installed.
"""

from __future__ import annotations

import msgspec

from tmd.core.values.reasons import in_words

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding with msgspec raises for them."""
LONGEST = 200


def brief(error: object) -> str:
    """What ``error`` says, cut short: it may quote whatever a stranger has sent."""
    text = in_words(error) if isinstance(error, BaseException) else str(error)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

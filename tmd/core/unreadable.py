"""Bytes that are no value of the type that was asked for: what decoding raises, and what is said.

Not in :mod:`tmd.core.errors`, which processes import that have nothing installed.
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding with msgspec raises for them."""
LONGEST = 200


def brief(error: object) -> str:
    """What ``error`` says, cut short: it may quote whatever a stranger has sent."""
    text = str(error)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

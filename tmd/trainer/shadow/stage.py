"""How far a shadow has come."""

from __future__ import annotations

from enum import IntEnum, auto


class ShadowStage(IntEnum):
    """Progress of the attempt; it never goes back."""

    ASKED = auto()  # the source was not yet asked to begin
    JUMPING = auto()  # the state arrives, and tails may skip whole steps
    OWN_STEPS = auto()  # this worker computes every step
    SETTLED = auto()  # in step: few digests from here on
    WON = auto()  # the vote has given this worker the rank


class ShadowPlace(IntEnum):
    """This worker's position in the source's steps."""

    WAITING = auto()  # at a boundary, or nowhere yet
    BETWEEN = auto()  # a tail was applied; the next boundary was not announced yet
    READY = auto()  # the current step can be computed

"""The vote: one small reduction over the world, after which all ranks know the same."""

from __future__ import annotations

from tmd.fabric import Fabric

STEPPING, CLOSING = 0, 1
"""What a vote is about: a step, or the end of a ``batches()`` call."""


def agree(fabric: Fabric, step: int, armed: int, kind: int) -> int:
    """Vote ok for ``step``; returns the epoch that all ranks are armed for, or 0.

    Raises:
        LinkError: a rank is gone or did not vote.
        RuntimeError: the ranks are not at the same place; nothing may be committed.
    """
    mine = [step, -step, kind, -kind]
    _, epoch, *place = fabric.reduce_min((1, armed, *mine))
    if place != mine:
        raise RuntimeError(
            f"ranks are at different places (steps {place[0]} to {-place[1]}): every rank must run "
            "the same number of steps in each batches() call"
        )
    return epoch

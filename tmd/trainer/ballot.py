"""The vote: one small reduction over the world, after which all ranks know the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec import msgpack

from tmd.core.errors import LinkError
from tmd.fabric import Fabric

T = TypeVar("T")

STEPPING, CLOSING = 0, 1
"""What a vote is about: a step, or the end of a ``batches()`` call."""


def agree(
    fabric: Fabric, step: int, armed: int, kind: int, shares: Sequence[int] = ()
) -> tuple[int, tuple[int, ...]]:
    """Vote ok for ``step``; returns the epoch that all ranks are armed for, or 0.

    ``shares``: numbers that are told beside; what is returned of each is the least.

    Raises:
        LinkError: a rank is gone or did not vote.
        RuntimeError: the ranks are not at the same place; nothing may be committed.
    """
    mine = [step, -step, kind, -kind]
    _, epoch, *rest = fabric.reduce_min((1, armed, *mine, *shares))
    place = rest[: len(mine)]
    if place != mine:
        raise RuntimeError(
            f"ranks are at different places (steps {place[0]} to {-place[1]}): every rank must run "
            "the same number of steps in each batches() call"
        )
    return epoch, tuple(rest[len(mine) :])


def gather(fabric: Fabric, own: Any, kind: type[T]) -> tuple[T, ...]:
    """What each rank says while the job is being set up, by rank; all msgspec can carry as a T.

    Raises:
        RuntimeError: a rank was lost.
    """
    rank, size = fabric.rank or 0, fabric.size or 1
    said = {rank: own}
    offset = 1
    try:
        while offset < size:
            heard = fabric.shift(msgpack.encode(said), offset)
            said |= msgpack.decode(heard, type=dict[int, kind])  # type: ignore[valid-type]
            offset *= 2
    except LinkError as error:
        raise RuntimeError(
            f"a rank was lost while the job was being set up ({error}); start it again"
        ) from error
    return tuple(said[rank] for rank in range(size))

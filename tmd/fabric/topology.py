"""Which ranks of a group communicate: pure functions of rank and size.

Every collective uses only edges between a rank and its neighbours (except all-to-all and
point-to-point), so these functions determine the links that a replacement must open.
"""

from __future__ import annotations


def neighbours(rank: int, size: int) -> frozenset[int]:
    """Ranks at a power-of-two distance on the circle: about ``2 * log2(size)`` of them.

    Contains the ring (distance 1), the partners of recursive doubling with its fold, and the edges
    of binomial trees with any root.
    """
    found: set[int] = set()
    distance = 1
    while distance < size:
        found.update(((rank + distance) % size, (rank - distance) % size))
        distance *= 2
    return frozenset(found - {rank})


def partners(rank: int, size: int) -> frozenset[int]:
    """The neighbours with whom a rank votes, by recursive doubling with its fold."""
    core = folded(size)
    if rank >= core:
        return frozenset({rank - core})
    guests = {rank + core} if rank + core < size else set()
    return frozenset({rank ^ (1 << n) for n in range(core.bit_length() - 1)} | guests)


def folded(size: int) -> int:
    """The largest power of two that is not above ``size`` (at least 1)."""
    return 1 << (size.bit_length() - 1)


def dials(worker: str, peer: str) -> bool:
    """Whether ``worker`` opens the link between the two; otherwise it waits for the call."""
    return worker < peer

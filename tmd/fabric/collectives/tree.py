"""Binomial trees: one rank to all, or all to one."""

from __future__ import annotations

from collections.abc import Sequence

from tmd.fabric.collectives.op import Op


def broadcast(op: Op, data: memoryview, root: int) -> None:
    """Fill ``data`` on every rank with that of ``root``."""
    place = (op.rank - root) % op.size
    distance = 1
    while distance < op.size:
        if place < distance:
            if place + distance < op.size:
                op.send((op.rank + distance) % op.size, data)
        elif place < 2 * distance:
            op.receive((op.rank - distance) % op.size, data)
        distance *= 2


def gather(op: Op, own: memoryview, root: int) -> list[memoryview] | None:
    """All blocks by rank on ``root``, ``None`` elsewhere. All have the size of ``own``."""
    place, width = (op.rank - root) % op.size, len(own)
    data = memoryview(bytearray(_subtree(place, op.size) * width))
    data[:width] = own
    distance = 1
    while distance < op.size:
        if place % (2 * distance):
            op.send((op.rank - distance) % op.size, data)
            return None
        if place + distance < op.size:
            count = min(distance, op.size - place - distance)
            into = data[distance * width : (distance + count) * width]
            op.receive((op.rank + distance) % op.size, into)
        distance *= 2
    return [_block(data, (rank - root) % op.size, width) for rank in range(op.size)]


def scatter(op: Op, parts: Sequence[memoryview] | None, into: memoryview, root: int) -> None:
    """Give each rank its part of ``parts`` on ``root``; all have the size of ``into``."""
    place, width = (op.rank - root) % op.size, len(into)
    data = memoryview(bytearray(_subtree(place, op.size) * width))
    distance = 1
    if place == 0:
        assert parts is not None
        for i in range(op.size):
            data[i * width : (i + 1) * width] = parts[(root + i) % op.size]
        while distance < op.size:
            distance *= 2
    else:
        distance = place & -place
        op.receive((op.rank - distance) % op.size, data)
    distance //= 2
    while distance:
        if place + distance < op.size:
            count = min(distance, op.size - place - distance)
            part = data[distance * width : (distance + count) * width]
            op.send((op.rank + distance) % op.size, part)
        distance //= 2
    into[:] = data[:width]


def _subtree(place: int, size: int) -> int:
    """Number of ranks below ``place``, itself included."""
    return min(place & -place, size - place) if place else size


def _block(data: memoryview, index: int, width: int) -> memoryview:
    return data[index * width : (index + 1) * width]

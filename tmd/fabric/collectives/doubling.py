"""Logarithmic algorithms for small data: few messages, each carrying everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tmd.fabric.collectives.op import Op
from tmd.fabric.memory import EMPTY
from tmd.fabric.topology import folded

MergePart = Callable[[bool], None]
"""Merge the received part into the own data; True if the received part is of the lower rank."""


def recursive_doubling(op: Op, data: memoryview, received: memoryview, merge: MergePart) -> None:
    """All-reduce ``data`` in place. Both ranks of a pair compute the same result.

    Ranks beyond the largest power of two first fold into a partner and get the result from it.
    """
    core = folded(op.size)
    if op.rank >= core:
        op.send(op.rank - core, data)
        op.receive(op.rank - core, data)
        return
    guest = op.rank + core
    if guest < op.size:
        op.receive(guest, received)
        merge(False)
    distance = 1
    while distance < core:
        partner = op.rank ^ distance
        op.swap(partner, data, partner, received)
        merge(partner < op.rank)
        distance *= 2
    if guest < op.size:
        op.send(guest, data)


def dissemination(op: Op, sizes: Sequence[int], own: memoryview) -> list[memoryview]:
    """All-gather: the blocks of all ranks by rank, ``sizes`` bytes each."""
    order = [(op.rank + i) % op.size for i in range(op.size)]
    edges = [0]
    for rank in order:
        edges.append(edges[-1] + sizes[rank])
    data = memoryview(bytearray(edges[-1]))
    data[: edges[1]] = own
    have = 1
    while have < op.size:
        # This rank holds the blocks of `have` ranks from its own upwards; the next come from above.
        count = min(have, op.size - have)
        down, up = (op.rank - have) % op.size, (op.rank + have) % op.size
        sent = sum(sizes[(op.rank + i) % op.size] for i in range(count))
        op.swap(down, data[:sent], up, data[edges[have] : edges[have + count]])
        have += count
    blocks = [EMPTY] * op.size
    for i, rank in enumerate(order):
        blocks[rank] = data[edges[i] : edges[i + 1]]
    return blocks


def barrier(op: Op) -> None:
    """Return when every rank has entered."""
    distance = 1
    while distance < op.size:
        op.swap((op.rank - distance) % op.size, EMPTY, (op.rank + distance) % op.size, EMPTY)
        distance *= 2

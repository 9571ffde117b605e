"""All-to-all: the one collective that needs links to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from tmd.fabric.collectives.op import Op


def alltoall(op: Op, outgoing: Sequence[memoryview], incoming: Sequence[memoryview]) -> None:
    """Send ``outgoing[r]`` to each rank r and receive ``incoming[r]`` from it."""
    incoming[op.rank][:] = outgoing[op.rank]
    for distance in range(1, op.size):
        to, source = (op.rank + distance) % op.size, (op.rank - distance) % op.size
        op.swap(to, outgoing[to], source, incoming[source])

"""Whole numbers of an operation that breaks are ones from which a script can take sizes.

DDP takes those of its buckets from a broadcast. Accelerate gathers the shapes of what it pads. By
numbers that never arrived both would allocate gigabytes.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.fabric.circle import circle
from tmd.fabric import Fabric

GARBAGE = 1 << 40


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_numbers_are_put_back_after_a_message_of_another_kind(waits: bool, inference: bool) -> None:
    """Rank 0 sends more, and floats. The operation ends all the same."""
    opts = dist.BroadcastOptions()
    opts.rootRank, opts.asyncOp = 0, not waits
    with torch.inference_mode() if inference else nullcontext():
        numbers = torch.arange(7, dtype=torch.int32)

    with circle(2) as c:
        c.group()

        def broadcast(fabric: Fabric) -> None:
            tensor = torch.ones(72) if fabric.rank == 0 else numbers
            c.of(fabric).broadcast([tensor], opts).wait()

        c.each(broadcast)
        broken = c.fabrics[1].poisoned

    assert broken
    assert numbers.tolist() == list(range(7))


def gathered(fabric: Fabric, group: dist.ProcessGroup) -> list[int]:
    """What a gather in one tensor and one in a list leave in new memory."""
    own, together = torch.tensor([3, 4]), torch.full((4,), GARBAGE)
    apart = [torch.full((2,), GARBAGE) for _ in range(2)]
    group._allgather_base(together, own).wait()
    group.allgather([apart], [own]).wait()
    return [*together.tolist(), *apart[0].tolist(), *apart[1].tolist()]


@pytest.mark.parametrize("void", [False, True], ids=["the broken operation", "those after it"])
def test_sizes_that_did_not_arrive_are_those_of_this_rank(void: bool) -> None:
    """And numbers to scatter and to exchange are of this rank, then zero."""
    with circle(2) as c:
        c.group()
        fabric = c.fabrics[0]
        fabric.poison("a member was lost")
        if void:
            c.of(fabric).barrier().wait()

        assert gathered(fabric, c.of(fabric)) == [3, 4] * 4
        exchanged = torch.full((4,), GARBAGE)
        c.of(fabric).alltoall_base(exchanged, torch.tensor([5, 6]), [2, 2], [1, 1]).wait()
        assert exchanged.tolist() == [5, 6, 0, 0]

"""A broadcast of whole numbers that breaks leaves them as they were.

DDP takes the sizes of its buckets from one, and would allocate gigabytes by other numbers.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.fabric.circle import circle
from tmd.fabric import Fabric


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

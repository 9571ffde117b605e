"""Compute time without waits, under real DDP in real processes."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.fabric.pool import pool
from tmd.fabric import backend
from tmd.fabric.wait_timer import busy_between

STEPS = 8
WIDTH = 700
"""A decomposition of a matrix of this size takes far longer than a step of the model below."""


class UnevenModel(nn.Module):
    """Does extra work if ``extra_work`` is set, and records how long that took."""

    def __init__(self, extra_work: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.extra_work = extra_work
        self.took = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        began = time.monotonic()
        if self.extra_work:
            torch.linalg.svdvals(torch.eye(WIDTH) + 0.1)
        self.took = time.monotonic() - began
        return self.layers(x)


def train(rank, size, store, slow):
    """Compute time of each step and how much of it was extra work, in seconds."""
    backend.register()
    dist.init_process_group(
        "tmd", store=dist.PrefixStore(f"{slow}", store), rank=rank, world_size=size
    )
    try:
        wait_timer = backend._Behind.solo.blocked
        module = UnevenModel(extra_work=rank == slow)
        # Small buckets: each step has several all-reduces, most of which overlap with backward().
        model = DistributedDataParallel(module, bucket_cap_mb=0.0001)
        found = []
        for _ in range(STEPS):
            begin = wait_timer.read()
            model(torch.ones(4, 8)).sum().backward()
            found.append((busy_between(begin, wait_timer.read()), module.took))
        return found[2:]  # the first is slow, and DDP rebuilds its buckets in the second
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("slow", [0, 1])
def test_ddp_waiting_for_futures_does_not_count_as_compute_time(slow, tmp_path):
    """The slow rank's extra work counts in full; the other rank's wait for it does not."""
    with pool(2, str(tmp_path / "store")) as workers:
        found = workers.run(train, slow)
    of_slow, of_other = found[slow], found[1 - slow]

    assert all(busy >= took for busy, took in of_slow)
    assert median(busy for busy, _ in of_other) < median(took for _, took in of_slow)

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


class Laden(nn.Module):
    """Computes more than its peers, and records the time."""

    def __init__(self, burden: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.burden = burden
        self.took = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        began = time.monotonic()
        if self.burden:
            torch.linalg.svdvals(torch.eye(WIDTH) + 0.1)
        self.took = time.monotonic() - began
        return self.layers(x)


def train(rank, size, store, slow):
    """The compute time of each step, and the share of the extra work."""
    backend.register()
    dist.init_process_group(
        "tmd", store=dist.PrefixStore(f"{slow}", store), rank=rank, world_size=size
    )
    try:
        wait_timer = backend._Behind.solo.blocked
        module = Laden(burden=rank == slow)
        # Small buckets: several operations in one step, most of them running while it computes.
        model = DistributedDataParallel(module, bucket_cap_mb=0.0001)
        found = []
        for _ in range(STEPS):
            begin = wait_timer.read()
            model(torch.ones(4, 8)).sum().backward()
            found.append((busy_between(begin, wait_timer.read()), module.took))
        return found[2:]  # DDP rebuilds its buckets after the first step
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("slow", [0, 1])
def test_waits_of_ddp_for_futures_do_not_count_as_compute_time(slow, tmp_path):
    """The late rank's extra work counts in full; the others' wait for it does not."""
    with pool(2, str(tmp_path / "store")) as workers:
        found = workers.run(train, slow)
    late, early = found[slow], found[1 - slow]

    assert all(busy >= took for busy, took in late)
    assert median(busy for busy, _ in early) < median(took for _, took in late)

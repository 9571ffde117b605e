"""A plain DDP job that goes on with fewer workers after a loss, unless it is started with --hold.

It notes which samples each rank draws. In some steps the loss of rank 0 is not a number, and all
ranks leave out the update.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import tmd.campaign.uncompiled
import tmd.trainer
from tmd.campaign.points import Injector
from tmd.trainer.state.digests import digest_of

SAMPLES = 256
BATCH = 4
injector = Injector()


class Net(nn.Module):
    """With dropout, whose stream belongs to a rank, and a constant buffer, such as a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        injector.reach("forward")
        out: Tensor = self.body(x * self.mask)
        if out.requires_grad:
            out.register_hook(lambda _: injector.reach("backward"))
        return out


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(SAMPLES, 16, generator=draw)
        self._targets = torch.randint(4, (SAMPLES,), generator=draw)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self._inputs[index], self._targets[index], index


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30, help="rounded up to a whole epoch")
    parser.add_argument(
        "--rigid",
        action="store_true",
        help="call a collective that a worker with two ranks cannot run",
    )
    parser.add_argument("--hold", action="store_true", help="register with elastic=False")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    session = tmd.trainer.join()
    injector.follow(session)
    dist.init_process_group("tmd")
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    torch.manual_seed(100 + session.rank)  # its own stream of dropout for each rank
    session.register(model=model, optimizer=optimizer, scheduler=scheduler, elastic=not args.hold)
    data = Numbered()
    sampler = torch.utils.data.DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    trace = Path(os.environ["TMD_TRACE"])
    name = os.environ.get("TMD_WORKER", f"golden-{session.rank}").replace("/", "_")
    drawn: dict[int, list[int]] = {}
    with (trace / f"{name}.samples").open("a", buffering=1) as samples:
        while session.step_number < args.steps:
            for inputs, targets, numbers in session.batches(loader):
                with session.step() as step:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    step.record(loss)
                    bad = session.step_number % 16 == 14 and dist.get_rank() == 0
                    (loss * math.nan if bad else loss).backward()
                    drawn[dist.get_rank()] = numbers.tolist()
                    if args.rigid:
                        dist.reduce(torch.ones(1), 0)
                    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    if norm.isfinite():
                        optimizer.step()
                    else:
                        step.skip_update()
                scheduler.step()
                if step.counts:
                    line = {"step": session.step_number - 1, "samples": drawn}
                    samples.write(json.dumps(line) + "\n")
                # PARTIAL: this worker has another rank to run in the step.
                if step.result is not tmd.trainer.StepResult.PARTIAL:
                    drawn = {}
                injector.reach("between")
    kind = "shadow" if session.shadowing else "weights"
    (trace / f"{kind}-{session.rank}").write_text(digest_of(list(model.parameters())))


if __name__ == "__main__":
    main()

"""A training script that is ported wrongly in one of the ways that people choose."""

from __future__ import annotations

import argparse
import os
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Subset, TensorDataset

from tmd.campaign.job import begin, injector, samples
from tmd.trainer.state.digests import digest_of

WAYS = ("counter", "prefetch", "noise", "seed", "part", "average", "master")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--wrong", choices=WAYS, required=True)
    args = parser.parse_args()
    session = begin()
    rank, size = dist.get_rank(), dist.get_world_size()  # the rank may move
    data = TensorDataset(*samples())
    loader = DataLoader(data, batch_size=8, sampler=session.sampler(256, 8, args.steps, seed=3))
    if args.wrong == "part":
        many = TensorDataset(*samples(8 * size * args.steps))
        loader = DataLoader(Subset(many, range(rank, len(many), size)), batch_size=8)
    net = nn.Linear(16, 4)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = AveragedModel(net, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)
    session.register(model=model, optimizer=optimizer)

    count = 0  # not a session.counter()
    noise = torch.Generator().manual_seed(session.rank)  # goes on from step to step
    own = cycle(DataLoader(data, batch_size=8))
    ahead: list[Tensor] = next(own)  # drawn before the step that uses it

    master = rank == 0

    for batch in session.batches(loader):
        with session.step() as step:
            inputs, targets = batch
            if args.wrong == "prefetch":
                (inputs, targets), ahead = ahead, next(own)
            if args.wrong == "seed":
                noise = torch.Generator().manual_seed(1000 * session.step_number + rank)
            if args.wrong in ("noise", "seed"):
                inputs = inputs + torch.randn(inputs.shape, generator=noise)
            if args.wrong == "counter":
                optimizer.param_groups[0]["lr"] = 1e-2 / (1 + count)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            step.record(loss)
        count += 1  # noqa: SIM113
        if args.wrong == "average":
            average.update_parameters(net)
        if master and args.wrong == "master":
            print(step.counts)
        injector.reach("between")
    if not session.shadowing:
        weights = digest_of([*net.parameters()])
        Path(os.environ["TMD_TRACE"], f"weights-{session.rank}").write_text(weights)


if __name__ == "__main__":
    main()

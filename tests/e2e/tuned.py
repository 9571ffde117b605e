"""A fine-tuning script: the head is trained first, and from the second loop on the body, too."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tmd.campaign.job import begin, injector
from tmd.trainer.state.digests import digest_of

FIRST = 20
"""Steps of the first loop."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    session = begin()
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(256, 16, generator=draw)
    body, head = nn.Linear(16, 24), nn.Linear(24, 4)
    model = DistributedDataParallel(nn.Sequential(body, nn.Tanh(), head))
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    session.register(model=model, optimizer=optimizer)

    for call, count in enumerate((FIRST, steps - FIRST)):
        if call == 1:
            optimizer.add_param_group({"params": list(body.parameters()), "lr": 1e-3})
        for number in session.batches(range(count)):
            with session.step() as step:
                optimizer.zero_grad()
                injector.reach("forward")
                part = data[(number * 8 + session.rank * 64) % 248 :][:8]
                loss = model(part).square().mean()
                loss.backward()
                optimizer.step()
                step.record(loss)
            injector.reach("between")
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    Path(os.environ["TMD_TRACE"], f"weights-{session.rank}").write_text(
        digest_of([*model.parameters(), *moments])
    )


if __name__ == "__main__":
    main()

"""A training script that reads its environment at import, as nanoGPT does, and records it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tmd.trainer
from tmd.campaign.points import Injector

NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
RANK = int(os.environ.get("RANK", -1))
"""The same line as in nanoGPT."""


def main() -> None:
    seen = {"RANK": str(RANK)} | {n: os.environ[n] for n in NAMES if n.startswith("TORCHELASTIC")}
    session = tmd.trainer.join()
    injector = Injector()
    injector.follow(session)
    dist.init_process_group("tmd")
    told = {n: os.environ[n] for n in NAMES}
    facts = {"before": seen, "after": told, "rank": session.rank, "standby": session.shadowing}
    worker = os.environ["TMD_WORKER"].replace("/", "_")
    Path(os.environ["TMD_TRACE"], f"saw-{worker}.json").write_text(json.dumps(facts))
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.register(model=model, optimizer=optimizer)
    for batch in session.batches([torch.ones(4, 2)] * 3):
        with session.step():
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        injector.reach("between")


if __name__ == "__main__":
    main()

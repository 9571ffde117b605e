"""The demo's job on torchft: one replica group of one rank, restarted by a torchrun of its own.

Tuned for a quick recovery: operations time out after two seconds. A replica that comes back gets
the state from a living one; until then the others train on with three quarters of the batch.
"""

from __future__ import annotations

# ruff: noqa: E402 - the life line comes before the seconds that torch takes to import
from tmd.lifeline import die_with_parent

die_with_parent()

import os
from datetime import timedelta
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

from bench import job

WORLD = int(os.environ.get("NUM_REPLICA_GROUPS", "1"))
REPLICA = int(os.environ.get("REPLICA_GROUP_ID", "0"))


def main() -> None:
    args = job.arguments()
    torch.manual_seed(args.seed)
    trace = job.Trace(args, REPLICA)
    bare = job.model(args)
    adam = torch.optim.AdamW(bare.parameters(), lr=args.lr)
    scheduler = CosineAnnealingLR(adam, args.steps)
    parts: dict[str, Any] = {"model": bare, "optimizer": adam, "scheduler": scheduler}

    def load_state_dict(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=2)),
        load_state_dict=load_state_dict,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=WORLD - 1,
        replica_id=f"replica-{REPLICA}-",
        timeout=timedelta(seconds=30),
    )
    model = DistributedDataParallel(manager, bare)
    optimizer = Optimizer(manager, adam)
    data = iter(job.batches(args, REPLICA, WORLD, 0))
    while manager.current_step() < args.steps:
        tokens, targets = next(data)
        optimizer.zero_grad()  # starts the quorum
        step = manager.current_step()
        loss = job.loss_of(model(tokens), targets)
        trace.fault(step)
        loss.backward()
        optimizer.step()  # applied only if all agree to commit
        if manager.current_step() > step:
            scheduler.step()
            trace.committed(manager.current_step() - 1, loss, manager.num_participants())
    manager.shutdown()


if __name__ == "__main__":
    main()

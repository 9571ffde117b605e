"""Two loops of a sharded model, each left by ``break`` after so many steps."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from tmd.campaign.job import Augmented, Net, begin, injector, leave_digest, samples, sharded

STEPS = 20


def main() -> None:
    session = begin()
    data = Augmented(*samples())
    net = Net(24, classes=6)
    model = sharded(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.register(model=model, optimizer=optimizer, snapshots=4)
    for _ in range(2):
        loader = DataLoader(data, 8, sampler=session.sampler(len(data), 8, 2 * STEPS, seed=3))
        for inputs, targets in session.batches(loader):
            with session.step() as step:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                step.record(loss)
            injector.reach("between")
            if step.counts and session.position.index == STEPS:
                break
        injector.reach("forward")  # behind the loop, too
    leave_digest(session, net)


if __name__ == "__main__":
    main()

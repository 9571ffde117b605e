"""A session without a daemon, in which ranks seem to be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from tmd.trainer import Session
from tmd.trainer.protocol.step_vote import VoteKind
from tmd.trainer.session.hooks import Interrupted, VoteOutcome
from tmd.trainer.session.standalone import StandaloneHooks
from tmd.trainer.state.data import Feed
from tmd.trainer.state.local import LocalState


class Health:
    """Of the present step, which breaks when a test says so."""

    broken = False
    failures = 0
    """How often the script has failed."""

    @property
    def known_broken(self) -> bool:
        return self.broken

    def fail(self) -> None:
        self.failures += 1

    def settle(self) -> None:
        """Nothing runs."""


class Voting(StandaloneHooks):
    """Notes the order of things; a vote may end as if a rank had been lost."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.lost: set[int] = set()
        """Votes, counted from 0, in which a rank is lost."""
        self.votes = 0
        self.calls = 0
        self.left: list[int] = []
        """The calls whose loop the script has left by ``break``."""
        self.health: Health = Health()

    def vote(self, local: LocalState, kind: VoteKind = VoteKind.STEPPING) -> VoteOutcome:
        self.seen.append("vote")
        self.votes += 1
        if self.votes - 1 in self.lost or self.health.broken:
            raise Interrupted
        return super().vote(local, kind)

    def left_loop(self, feed: Feed) -> None:
        self.left.append(feed.call)

    def applying(self, optimizer: Optimizer) -> None:
        self.seen.append("apply")


class Script:
    """A model of one weight, whose gradient is the batch."""

    def __init__(self, *, optimizers: int = 1) -> None:
        self.hooks = Voting()
        self.session = Session(self.hooks)
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        others = [[nn.Parameter(torch.zeros(1))] for _ in range(optimizers - 1)]
        self.optimizers = [SGD(p, lr=1.0) for p in ([*self.model.parameters()], *others)]
        self.session.register(model=self.model, optimizer=self.optimizers, **self.others())

    def others(self) -> dict[str, Any]:
        """What else is registered."""
        return {}

    @property
    def weight(self) -> float:
        return float(self.model.weight.detach())

    def closure(self, batch: float) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            self.model.zero_grad()
            self.hooks.seen.append("backward")
            loss: Tensor = self.model(torch.tensor([batch])).sum()
            loss.backward()
            return loss

        return compute

"""Runs a session without a daemon: the script trains unprotected, with the same numbers."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

import torch
from msgspec import structs
from torch import nn

from tmd.core.values.checkpoints import MissedCheckpoint, SavedCheckpoint
from tmd.core.values.model import Activity, WorkerStatus
from tmd.trainer.protocol.step_vote import VoteKind
from tmd.trainer.session.handovers import Handovers
from tmd.trainer.session.hooks import HealthHooks, VoteOutcome
from tmd.trainer.session.trace import peak_rss
from tmd.trainer.state.data import Feed
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.replicas import Partition
from tmd.trainer.state.state import Registry
from tmd.trainer.state_transfer.verification import StateVerdict

log = logging.getLogger("tmd.trainer")


class OneRank:
    """A rank that is lost ends the job, so no other worker computes for it."""

    ranks: tuple[int, ...] = ()

    def allow(self, obstacle: str) -> None:
        """There is nobody to adopt a rank."""

    def refuse(self, why: str) -> None:
        """As above."""

    def draw_for(self, rank: int) -> None:
        """Never called."""

    def begin_pass(self, rank: int, *, first: bool, last: bool) -> None:
        """Never called."""

    def end_pass(self) -> bool:
        return True

    def leave_step(self) -> None:
        """Never called."""


class Intact:
    """Any lost rank ends the job, so no broken step is ever seen."""

    broken = known_broken = False

    def fail(self) -> None:
        """The other ranks end with this one."""

    def settle(self) -> None:
        """There is nothing to wait for."""


class StandaloneHooks:
    """Commits every step. Rank and world size come from torchrun, or are 0 of 1."""

    adoption = OneRank()
    shadowing = False
    health: HealthHooks = Intact()
    idle = False
    finishing = False
    calls = 0
    """Collectives are not counted: a lost rank ends the job anyway."""

    def __init__(self) -> None:
        _complete_environment()
        self.handovers = Handovers()
        rank = int(os.environ["RANK"])
        size = int(os.environ["WORLD_SIZE"])
        self._status = WorkerStatus(
            worker=f"solo/{rank}",
            job="",
            world_size=size,
            address="",
            pid=os.getpid(),
            activity=Activity.TRAINING,
            rank=rank,
        )
        if rank == 0:
            log.warning("TMD_SOCKET is not set: training without a tmd daemon and its protection")

    @property
    def status(self) -> WorkerStatus:
        return self._status

    @property
    def rank(self) -> int:
        return self._status.rank or 0

    def current(self) -> WorkerStatus:
        return structs.replace(self._status, rss_bytes=peak_rss())

    def set_builder(self, again: Callable[[], None]) -> None:
        """A standalone script never changes its rank."""
        again()

    def registered(
        self,
        registry: Registry,
        wrapped: list[nn.Module],
        local: LocalState,
        alike: Partition,
        snapshots: int,
    ) -> None:
        """The state never moves."""

    def seeds(self, own: int) -> tuple[int, ...]:
        # Only this rank's entry is ever used.
        return (own,) * self._status.world_size

    def gathered(self, own: str) -> tuple[str, ...]:
        size = self._status.world_size
        if size == 1:
            return (own,)
        values: list[str] = [""] * size
        torch.distributed.all_gather_object(values, own)
        return tuple(values)

    def resumed(self, step: int, local: LocalState) -> None:
        self._status = structs.replace(self._status, step=step)

    def saved(self, saved: SavedCheckpoint | None, missed: MissedCheckpoint | None) -> None:
        self._status = structs.replace(self._status, saved=saved, missed=missed)

    def follow(self, feed: Feed) -> None:
        """No peer asks for the data position."""

    def verdict(self) -> StateVerdict:
        """The state never comes from another worker."""
        return lambda: ""

    def begun(self, *, trains: bool = True) -> None:
        """No peer compares step times."""

    def vote(self, local: LocalState, kind: VoteKind = VoteKind.STEPPING) -> VoteOutcome:
        return VoteOutcome.COMMIT

    def applying(self, optimizer: torch.optim.Optimizer) -> None:
        """No shadow is attached."""

    def boundary(self) -> bool:
        """Nothing ever happens between two steps."""
        return True

    def close_feed(self, feed: Feed, local: LocalState) -> bool:
        feed.close()
        self.advance(local)
        return True

    def left_loop(self, feed: Feed) -> None:
        """No rank rolls back."""

    def advance(self, local: LocalState) -> None:
        # Count as in a managed job, for the same random numbers.
        self._status = structs.replace(self._status, step=self._status.step + 1)

    def committed(self, local: LocalState, loss: float | None, seconds: float) -> None:
        self._status = structs.replace(
            self._status,
            step=self._status.step + 1,
            loss=loss,
            step_seconds=seconds,
        )

    def warn(self, **found: str) -> None:
        """No daemon raises an alert."""

    def shadowed(self) -> None:
        """A standalone script runs no shadow iterations."""


def _complete_environment() -> None:
    """Let ``python train.py`` run as a world of one."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )

"""Hooks that the session calls at step boundaries, and their results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import NoReturn, Protocol

import torch
from torch import nn

from tmd.core.planning.directives import Directive, Leave
from tmd.core.values.checkpoints import MissedCheckpoint, SavedCheckpoint
from tmd.core.values.model import Activity, WorkerStatus
from tmd.trainer.protocol.step_vote import VoteKind
from tmd.trainer.session.handovers import Handovers
from tmd.trainer.state.data import Feed
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.replicas import Partition
from tmd.trainer.state.state import Registry
from tmd.trainer.state_transfer.verification import StateVerdict

SHADOWS = frozenset(
    {
        Activity.STARTING,
        Activity.STANDBY,
        Activity.SHADOWING,
        Activity.IN_STEP,
        Activity.PREPARED,
    }
)
"""Activities whose results are never committed."""

LOST_IN_SETUP = "a rank was lost during set-up: start the job again, no step was lost"
"""Why a worker ends that has never made a step."""

log = logging.getLogger("tmd.trainer")


class Interrupted(BaseException):
    """The step is poisoned and will be repeated. Swallowed by ``session.step()``.

    A ``BaseException`` so that ``except Exception`` in a training script cannot swallow it.
    """


class Partial(Interrupted):
    """The pass for one of several ranks ends where the vote would be; its gradients count in the
    last pass of the step. Swallowed by ``session.step()``."""


class VoteOutcome(Enum):
    """Outcome of a vote for this rank."""

    COMMIT = auto()
    SHADOW = auto()
    """A shadow iteration: the optimizer runs, but nothing is committed."""


class PassHooks(Protocol):
    """For steps that are computed once for each of several ranks."""

    def allow(self, obstacle: str) -> None: ...
    def refuse(self, why: str) -> None: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    def draw_for(self, rank: int) -> None: ...
    def begin_pass(self, rank: int, *, first: bool, last: bool) -> None: ...
    def end_pass(self) -> bool: ...
    def leave_step(self) -> None: ...


class HealthHooks(Protocol):
    """Whether the current step can still be committed."""

    def fail(self) -> None: ...
    @property
    def broken(self) -> bool: ...
    @property
    def known_broken(self) -> bool: ...
    def settle(self) -> None: ...


class StepHooks(Protocol):
    """Implemented by the coordinator of a managed job, and by the hooks of a standalone script."""

    @property
    def adoption(self) -> PassHooks: ...
    @property
    def handovers(self) -> Handovers: ...
    @property
    def status(self) -> WorkerStatus: ...
    @property
    def rank(self) -> int: ...
    def current(self) -> WorkerStatus: ...
    @property
    def shadowing(self) -> bool: ...
    @property
    def health(self) -> HealthHooks: ...
    @property
    def idle(self) -> bool: ...
    def set_builder(self, again: Callable[[], None]) -> None: ...
    def registered(
        self,
        registry: Registry,
        wrapped: list[nn.Module],
        local: LocalState,
        alike: Partition,
        snapshots: int,
    ) -> None: ...
    def seeds(self, own: int) -> tuple[int, ...]: ...
    def gathered(self, own: str) -> tuple[str, ...]: ...
    def resumed(self, step: int, local: LocalState) -> None: ...
    def saved(self, saved: SavedCheckpoint | None, missed: MissedCheckpoint | None) -> None: ...
    def follow(self, feed: Feed) -> None: ...
    def verdict(self) -> StateVerdict: ...
    def begun(self, *, trains: bool = True) -> None: ...
    def vote(self, local: LocalState, kind: VoteKind = VoteKind.STEPPING) -> VoteOutcome: ...
    def applying(self, optimizer: torch.optim.Optimizer) -> None: ...
    def boundary(self) -> bool: ...
    def close_feed(self, feed: Feed, local: LocalState) -> bool: ...
    def left_loop(self, feed: Feed) -> None: ...
    @property
    def finishing(self) -> bool: ...
    @property
    def calls(self) -> int: ...
    def committed(self, local: LocalState, loss: float | None, seconds: float) -> None: ...
    def advance(self, local: LocalState) -> None: ...
    def warn(self, **found: str) -> None: ...
    def shadowed(self) -> None: ...


def dismiss(directive: Directive) -> NoReturn:
    """End this worker as ``directive``, usually a ``Leave``, demands."""
    detail = directive.detail if isinstance(directive, Leave) else ""
    if detail:
        log.warning("dismissed: %s", detail)
    raise SystemExit(directive.code if isinstance(directive, Leave) else 0)

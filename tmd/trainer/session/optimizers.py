"""Watches the registered optimizers: the vote comes before the first one that runs in a step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any

import torch

from tmd.fabric import device
from tmd.fabric.device import Queued
from tmd.fabric.untraced import untraced
from tmd.torch_private.optimizers import call_after_scaled_step
from tmd.trainer.state.buffers import version
from tmd.trainer.state.dtensors import is_spread
from tmd.trainer.state.optimizer_state import params_of

log = logging.getLogger("tmd.trainer")


class Stage(Enum):
    """How far the present step is."""

    OUTSIDE = auto()
    """No body of a loop over batches runs. This worker may follow the steps of a rank."""
    BETWEEN_STEPS = auto()
    """The body of a loop runs, and no step is open in it."""
    COMPUTING = auto()
    VOTED = auto()


class OptimizerHooks:
    """Pre- and post-hooks of the registered optimizers.

    Args:
        vote: called before each optimizer runs; votes once per step.
        applying: called after the vote, when the optimizer is about to run.
        calls: number of collectives and messages that the script has called.
        stage: returns how far the present step is.
    """

    def __init__(
        self,
        vote: Callable[[], None],
        applying: Callable[[torch.optim.Optimizer], None],
        calls: Callable[[], int],
        stage: Callable[[], Stage],
    ) -> None:
        self._vote, self._applying, self._calls, self._stage = vote, applying, calls, stage
        self._ran_at: int | None = None
        """Number of calls when the latest optimizer of this step ended; ``None`` before that."""
        self._began: list[tuple[torch.optim.Optimizer, int]] = []
        """Each optimizer that runs now, and the number of calls when it began, after the vote. The
        ``step`` of a class may call that of its base, which has hooks, too."""
        self._applied: list[Queued] = []
        """What the optimizers of this step have queued on a device."""
        self._spread: list[torch.optim.Optimizer] = []
        """Those of distributed parameters."""
        self._seen: set[int] = set()
        """Optimizers that have run in a step, by identity."""
        self._running: Counter[str] = Counter()
        """By type, how many calls have begun in this step, voted, and have not ended."""

    def attach(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        faces: Iterable[torch.optim.Optimizer],
        scalers: Iterable[torch.amp.GradScaler],
    ) -> None:
        """Watch ``optimizers``. The script calls ``faces``, which may stand for several of them.

        A scaler that has found an overflow skips its optimizer. The vote then comes before what the
        script does after that, such as an update of averaged weights, which cannot be undone.
        """
        self._seen.clear()
        self._spread.clear()
        for each in optimizers:
            if any(map(is_spread, params_of(each))):
                self._spread.append(each)
            each.register_step_pre_hook(self._before)
            each.register_step_post_hook(self._ended)
        for each in faces:
            each.register_step_post_hook(self._after)
        for scaler in scalers:
            call_after_scaled_step(scaler, self, OptimizerHooks._scaled)

    def begin(self) -> None:
        """A step begins."""
        self._ran_at = None
        self._applied.clear()
        self._running.clear()
        self._began.clear()

    def check_complete(self) -> None:
        """Raises RuntimeError: an optimizer has begun in this step, and failed."""
        if failed := [name for name, calls in self._running.items() if calls > 0]:
            raise RuntimeError(
                f"{', '.join(failed)} has failed in a step on whose update all "
                "ranks have agreed, so that the weights of this worker may differ from theirs. Let "
                "the error end the script: the rank is then replaced"
            )

    def precede(self) -> None:
        """Let later work of this thread come after what optimizers have queued in other streams.

        Threads that copy or compare the state wait only for the stream that is current at the
        boundary, and a script may choose another one inside the step.
        """
        for queued in self._applied:
            queued.precede()
        self._applied.clear()

    @untraced
    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        changed, name = None, type(optimizer).__name__
        if self._stage() is Stage.BETWEEN_STEPS:
            raise RuntimeError(
                f"{name} runs in the loop over session.batches(), but outside of session.step(): "
                "after a loss or a move its update would be missing, or made twice. Compute the "
                "step, and call the optimizer, in 'with session.step():'"
            )
        later = self._stage() is Stage.VOTED
        self._running[name] += later
        if closure is not None:
            # Its backward pass sums gradients, and the vote must come after that.
            with torch.enable_grad():
                evaluated = EvaluatedClosure(optimizer, closure())
            if len(args) > 1:
                changed = (args[0], evaluated, *args[2:]), kwargs
            else:
                changed = args, {**kwargs, "closure": evaluated}
        in_step = self._stage() is not Stage.OUTSIDE
        if in_step and self._ran_at not in (None, self._calls()):
            raise RuntimeError(
                f"{name} runs after collectives or messages that followed "
                "another optimizer of the same step: if a rank is lost in them, some parameters "
                "are updated and others are not. Before the first optimizer runs, compute, "
                "unscale and clip the gradients of all; or give each optimizer a batch and a "
                "session.step() of its own"
            )
        if in_step and id(optimizer) not in self._seen:
            self._seen.add(id(optimizer))
            _warn_without_gradients(optimizer)
        if not later:
            for each in self._spread:
                _reduce_gradients(each)
        self._vote()
        if not any(optimizer is each for each, _ in self._began):
            self._applying(optimizer)
        self._running[name] += not later
        self._began.append((optimizer, self._calls()))
        return changed

    def _scaled(self) -> None:
        self._vote()
        if self._ran_at is None:  # the optimizer was skipped
            self._ran_at = self._calls()

    @untraced
    def _ended(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        name = type(optimizer).__name__
        if self._began.pop()[1] != self._calls() and self._stage() is Stage.VOTED:
            raise RuntimeError(
                f"{name}.step() calls collectives. They are allowed only before the optimizer: a "
                "rank that is lost in them would corrupt the weights of the others, which have "
                "voted for the step. Use an optimizer without communication, or "
                "ZeroRedundancyOptimizer, whose parameters are sent once more after a loss"
            )
        self._running[name] -= 1

    @untraced
    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._ran_at = self._calls()
        self._applied.append(device.current().queued(params_of(optimizer)))


class EvaluatedClosure:
    """What an optimizer gets in place of its closure, which has run before the vote."""

    def __init__(self, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        self._name, self._params = type(optimizer).__name__, params_of(optimizer)
        self._loss, self._asked, self._versions = loss, False, self._now()

    def _now(self) -> list[int]:
        return [version(param) for param in self._params]

    def __call__(self) -> Any:
        """The loss. Raises RuntimeError: the optimizer asks for another one."""
        if self._asked or self._now() != self._versions:
            raise RuntimeError(
                f"{self._name}.step(closure) evaluates its closure more than once, or at other "
                "weights than those of the step, as SAM does: its gradients would be summed after "
                "the vote. Make all forward and backward passes in the step yourself, and "
                "register the optimizer that runs last, such as the base optimizer of SAM"
            )
        self._asked = True
        return self._loss


def refuse_unusable(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Check the registered optimizers.

    Raises:
        TypeError: there are none, or one evaluates its closure more than once.
    """
    if not optimizers:
        raise TypeError(
            "register(optimizer=...): there is no torch.optim.Optimizer in it. All ranks vote when "
            "one is called: register the one inside your object, and its other state by a name "
            "of its own"
        )
    if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
        raise TypeError(
            "register(optimizer=...): LBFGS evaluates its closure several times in one step, so "
            "gradients are summed after the vote; use a first-order optimizer"
        )


def _reduce_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Sum gradients that are still divided among ranks, as with ``SequenceParallel``. Otherwise the
    optimizer would do so, after the vote."""
    params: Iterable[Any] = filter(is_spread, params_of(optimizer))
    with torch.no_grad():
        for param in params:
            if is_spread(param.grad) and param.grad.placements != param.placements:
                param.grad = param.grad.redistribute(placements=param.placements)


def _warn_without_gradients(optimizer: torch.optim.Optimizer) -> None:
    params = params_of(optimizer)
    # Megatron keeps gradients of its own.
    if params and all(p.grad is None and not hasattr(p, "main_grad") for p in params):
        log.warning(
            "%s runs, but none of its parameters has a gradient: call backward() in "
            "session.step(), and give it the parameters of the registered model",
            type(optimizer).__name__,
        )

"""Takes each step from its beginning through the vote to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch import Tensor

from tmd.trainer.protocol.step_vote import VoteKind
from tmd.trainer.session.hooks import Interrupted, Partial, StepHooks, VoteOutcome
from tmd.trainer.session.optimizers import OptimizerHooks, Stage
from tmd.trainer.session.script_error import ScriptError
from tmd.trainer.session.trace import Trace
from tmd.trainer.state.data import Feed
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.owners import Owners
from tmd.trainer.state.state import Registry
from tmd.trainer.state.unregistered import UnregisteredState

log = logging.getLogger("tmd.trainer")


class StepCycle:
    """Takes each step from beginning to end.

    ``settle`` waits for a checkpoint that is still copying the state, and gets whether the step has
    changed what was being copied.
    """

    def __init__(self, hooks: StepHooks, trace: Trace, settle: Callable[[bool], None]) -> None:
        self.hooks = hooks
        self._trace, self._settle = trace, settle
        self._optimizers = OptimizerHooks(
            self._decide_to_apply, hooks.applying, lambda: hooks.calls, self._stage
        )
        self._local: LocalState | None = None
        self.feed: Feed | None = None
        """Of the present ``batches`` call."""
        self.outcome: VoteOutcome | None = VoteOutcome.SHADOW
        """Outcome of the current step; ``None`` until it votes. It is SHADOW outside of steps, so
        that an optimizer that is called there starts no vote."""
        self.spoilt = False
        """Whether the latest step broke, and has not been undone."""
        self._lost_vote = False
        """Whether the vote on the present step has raised Interrupted."""
        self._open = False
        """Whether a step has begun and not ended."""
        self.in_body = False
        """Whether the body of the loop runs: the script has the batch of a step, or has had it."""
        self.error = ScriptError(hooks)
        self._skips_update = False
        """Whether the present step ends without an update."""
        self._drops = False
        """Whether the gradients of such a step are still to be set to zero."""
        self._trains = True
        self._loss: Tensor | float | None = None
        """The loss of the present step, if the script has recorded one."""
        self._pass: int | None = None
        """The rank of the present pass; ``None`` in the last one of a step."""
        self._losses: dict[int, float | None] = {}
        """The losses of the earlier passes of this step, by rank."""
        self._registry: Registry | None = None
        """Set until the first step has checked its modules for extra state."""
        self._owners: Owners | None = None
        self._unregistered: UnregisteredState | None = None
        self._scaled = self._left_gradients = False
        self._warnings: list[str] = []
        self.leaves_early = False
        """Whether the present ``batches`` call leaves broken steps early."""
        self._last_commit = time.monotonic()

    def _stage(self) -> Stage:
        if self._open:
            return Stage.COMPUTING if self.outcome is None else Stage.VOTED
        return Stage.BETWEEN_STEPS if self.in_body else Stage.OUTSIDE

    def watch(self, registry: Registry, local: LocalState) -> None:
        """Vote before the optimizers of ``registry``."""
        self._local, self._registry = local, registry
        self._owners = registry.owners
        self._unregistered = UnregisteredState(registry)
        scalers = [each for each in registry.scalers if each.is_enabled()]
        self._scaled = bool(scalers)
        self._optimizers.attach(registry.optimizers, registry.faces, scalers)

    def begin(self, *, trains: bool = True) -> None:
        """The script begins to compute a step, in which an optimizer runs if it ``trains``."""
        assert self._local is not None
        self.check_ended()
        if trains and not self.spoilt and self.feed is not None and not self.feed.drawn:
            raise RuntimeError(
                "session.step() was called a second time for one batch, or after the loop. If a "
                "rank is lost, only the first step of a batch is repeated: call all optimizers in "
                "one step, or give each a batch of its own"
            )
        self.outcome, self._open, self._trains = None, True, trains
        self._loss, self._skips_update, self._lost_vote = None, False, False
        self.error.begin()
        late = self._local.changed_since_vote()
        if late and self.hooks.rank == 0:
            self._warn(
                f"the script changes {', '.join(late[:3])} between the vote of a step and the "
                "next step: a rank that is lost comes back with the values of the vote. Change "
                "buffers before the optimizer runs"
            )
        if trains and self._drops:
            self._local.zero_gradients()
            self._drops = False
        if not self.spoilt:  # a further step of a broken batch is undone with the first one
            self._local.begin(trains=trains)
        self._optimizers.begin()
        self._trace.begun()
        self.hooks.begun(trains=trains)

    def record(self, loss: Tensor | float) -> None:
        """The script has computed the loss of the present step."""
        self._loss = loss.detach() if isinstance(loss, Tensor) else loss

    def skip_update(self) -> None:
        """Vote on the present step, in which no optimizer runs. Raises Interrupted."""
        self._check_trains()
        if self._open and self.outcome is None:
            self._skips_update = self._drops = True
            self.decide()

    def begin_pass(self, rank: int, *, first: bool, last: bool) -> None:
        """The script begins to compute a step for ``rank``, one of several that it holds."""
        assert self._local is not None
        if first:
            self._losses = {}
        else:
            # Undo what the previous pass has changed, in the step or after it.
            self._local.undo()
        self._pass = None if last else rank
        self.hooks.adoption.begin_pass(rank, first=first, last=last)

    def end_pass(self) -> None:
        """A pass that is not the last has come to where the vote would be."""
        assert self._pass is not None
        assert self._local is not None
        self._losses[self._pass] = self._read_loss()
        self._local.set_aside(loose=True)
        self._pass, self.outcome = None, VoteOutcome.SHADOW
        self.close()

    def check_ended(self) -> None:
        """Raises RuntimeError: a step has begun and not ended, or the script has failed."""
        self.error.check()
        if self._open:
            raise RuntimeError(
                "a step of session.begin() was not ended: call step.end() before the next step "
                "and before the next batch"
            )

    def close(self) -> None:
        """The step has ended."""
        self._open = False

    def fail(self, error: BaseException) -> None:
        """The script has left the step with ``error``, and must not go on with another one."""
        self._open = False
        if self._trains:
            self.error.leave_step(error)

    def leave_part(self, error: BaseException) -> None:
        """A part of the step has raised ``error``. The script may go on with the next one."""
        if self._trains:
            self.error.leave_part(error)

    @property
    def why_not_done(self) -> str:
        """Why training cannot be over for this rank, in words; empty if it can."""
        if self.error.ends(is_open=self._open):
            return "the script ends after an error in a training step or in session.batches()"
        if self.spoilt and not self.hooks.shadowing:
            return "the script has left its loop after a broken step, which may be missing here"
        return ""

    def keep(self, *, loose: bool = False) -> None:
        """Save what later code may change, for :meth:`take_back` and :meth:`has_changed`.
        ``loose``: see :meth:`LocalState.keep`."""
        assert self._local is not None
        self._local.keep(loose=loose)

    def take_back(self) -> None:
        """Undo what code has changed since :meth:`keep`."""
        assert self._local is not None
        self._local.undo()

    def has_changed(self) -> bool:
        """Whether code has changed a registered object since :meth:`keep`."""
        assert self._local is not None
        return self._local.changed()

    @property
    def moves(self) -> bool:
        """Whether parameters may change in a step before its optimizer runs."""
        return self._local is not None and self._local.moves

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._open

    @property
    def is_broken(self) -> bool:
        """Whether the present step will be repeated; waits while that is being decided."""
        return self._lost_vote or self.spoilt or self.hooks.health.broken

    @property
    def can_be_left(self) -> bool:
        """Whether a step is open that will be repeated, and whose vote has not begun."""
        votes_later = self._open and self._trains and self.outcome is None
        return votes_later and self.hooks.health.known_broken

    def _decide_to_apply(self) -> None:
        self._check_trains()
        if self._open and self._skips_update:
            raise RuntimeError("an optimizer runs after step.skip_update() in the same step")
        self.decide()

    def _check_trains(self) -> None:
        if self._open and not self._trains:
            raise RuntimeError(
                "an optimizer runs in a function of session.repeatable(): train in session.step()"
            )

    def decide(self, *, skipped: bool = False) -> None:
        """Vote, unless this step has voted. Raises Interrupted.

        ``skipped``: the step is at its end, since a scaler has skipped the optimizer.
        """
        if self.outcome is None:
            assert self._local is not None
            if self._trains and not self.spoilt:
                self._local.at_vote(updates=not skipped)
            self._settle(self._local.torn)
            self._trace.computed()
            if self.spoilt:
                raise Interrupted  # a further step of a batch that comes again
            if self._registry is not None:
                # Some modules have an extra state only after a first forward.
                registry, self._registry = self._registry, None
                registry.refuse_hidden()
            if self._pass is not None:
                raise Partial if self.hooks.adoption.end_pass() else Interrupted
            try:
                self.outcome = self.hooks.vote(self._local, self._kind)
            except Interrupted:
                self._lost_vote = True
                raise
            self._local.release_start()
            if self.outcome is VoteOutcome.COMMIT:
                # Little is queued on the device here. After the optimizer it would be busy again.
                self._read_loss()

    @property
    def _kind(self) -> VoteKind:
        if not self._trains:
            return VoteKind.REPEATING
        return VoteKind.SKIPPING if self._skips_update else VoteKind.STEPPING

    def _read_loss(self) -> float | None:
        """The loss as a number; waits once for the device that holds it."""
        if self._loss is not None:
            self._loss = float(self._loss)
        return self._loss

    def end(self) -> bool:
        """End the step; returns whether it was committed and this worker holds the rank.

        Raises:
            Interrupted: it is broken.
            RuntimeError: no registered optimizer was called in it, or one has failed.
        """
        if self.outcome is None:
            self._check_update()
            self.decide(skipped=True)
        self._optimizers.check_complete()
        assert self.feed is not None
        assert self._local is not None
        self.close()
        self._optimizers.precede()
        if self._trains:
            self._local.close()
        else:
            self._local.release()
        if self.outcome is VoteOutcome.SHADOW:
            self.feed.commit()
            self.hooks.shadowed()
            return False
        if not self._trains:
            self.hooks.advance(self._local)
            self._last_commit = time.monotonic()
            return not self.hooks.shadowing
        now = time.monotonic()
        value = self._read_loss()
        self.feed.commit()
        self.hooks.committed(self._local, value, now - self._last_commit)
        self._last_commit = now
        if self.hooks.shadowing:
            return False
        self._trace.write(self.hooks.current, self._shown(value))
        self._look_for_unregistered()
        return True

    def _check_update(self) -> None:
        """Raises RuntimeError: no optimizer has run in a training step, and nothing says why;
        Interrupted if the step is broken."""
        if not self._trains:
            return
        if not self._scaled:
            if self.is_broken:
                raise Interrupted  # its numbers may have kept the script from its optimizer
            raise RuntimeError(
                "no registered optimizer was called in session.step(); to accumulate gradients use "
                "session.batches(loader, accumulate=k) and call it once in the step; to leave out "
                "the update for a batch, call step.skip_update() on all ranks"
            )
        self._look_for_accumulated()

    def _look_for_accumulated(self) -> None:
        """Warn once of gradients that a step with a scaler leaves without an optimizer: the script
        may drop them, as for a norm that is too large, or accumulate them."""
        assert self._local is not None
        if not self._left_gradients and self._local.has_usable_gradients:
            self._left_gradients = True
            self._warn(
                "a step has ended with gradients that no optimizer has used: if the script "
                "accumulates them over several steps, they are lost with a broken step, and a "
                "joiner does not have them; use session.batches(loader, accumulate=k)"
            )

    def _shown(self, loss: float | None) -> dict[int, float | None]:
        """The losses of the step that has ended, by rank, and ``loss`` in its last pass."""
        losses, self._losses = self._losses, {}
        return {**losses, self.hooks.rank: loss}

    def _look_for_unregistered(self) -> None:
        # All ranks run one script: one of them warns.
        if self._unregistered is None or self.hooks.rank != 0:
            return
        if found := self._unregistered.committed():
            self._warn(found)

    def _warn(self, found: str) -> None:
        log.warning(found)
        self._warnings.append(found)
        self.hooks.warn(unregistered="; ".join(self._warnings))

    def spoil(self) -> None:
        """The step is broken."""
        if self.outcome is None:
            self.hooks.health.settle()
            if self._trains:  # an evaluation may exchange all weights, and puts them back itself
                assert self._local is not None
                self._local.set_aside()
                self._settle(self._local.torn)  # code behind the block may change the state
        self.spoilt, self.outcome, self._pass = True, VoteOutcome.SHADOW, None
        self._losses = {}
        self.close()
        if not self.hooks.shadowing:
            self._trace.undone(self.hooks.status)

    def at_boundary(self) -> None:
        """Between two steps: undo a broken one, and the effects of code after its block. Notice
        parameters that an optimizer has got since."""
        if self._owners is not None:
            self._owners.look()
        if self.spoilt:
            assert self._local is not None
            assert self.feed is not None
            self.spoilt = False
            self._local.undo()
            self.feed.rewind()

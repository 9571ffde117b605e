"""The present step of a rank whose operations may outlive its epoch.

When a rank is lost in the middle of a step, the operations under way do not end with garbage. They
wait until it is known whether a hot standby takes the lost rank's place. Then they run again in the
new epoch, or the step is void. ``TABLE`` has every legal transition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import StrEnum

from tmd.core.values.errors import LinkError
from tmd.core.values.tables import next_state
from tmd.core.worker.broken_step import Place, Progress, Rerun
from tmd.fabric.counters import CallCounter
from tmd.fabric.grouping import Groups

DRAIN_S = 60.0


class StepState(StrEnum):
    CLOSED = "closed"
    """There is no step, or none that can be finished after a loss."""
    OPEN = "open"
    """Operations run."""
    SUSPENDED = "suspended"
    """Operations wait."""
    VOID = "void"
    """Operations end at once, without a result, until the script comes to the next batch."""
    FAILED = "failed"
    """The script has left a step with an error: operations end at once until the process ends,
    those with an output by an error."""


class StepEvent(StrEnum):
    BEGUN = "the script begins a step"
    BROKE = "a rank was lost"
    RESUMED = "all go on in a new epoch"
    GIVEN_UP = "it cannot be finished"
    ENDED = "the script comes to the vote, or leaves the step"
    UNDONE = "the script comes to its next batch"
    RAISED = "the script leaves it with an error"


TABLE: dict[StepState, dict[StepEvent, StepState]] = {
    StepState.CLOSED: {
        StepEvent.BEGUN: StepState.OPEN,
        StepEvent.RAISED: StepState.FAILED,
    },
    StepState.OPEN: {
        StepEvent.BROKE: StepState.SUSPENDED,
        StepEvent.ENDED: StepState.CLOSED,
        StepEvent.RAISED: StepState.FAILED,
    },
    StepState.SUSPENDED: {
        StepEvent.RESUMED: StepState.OPEN,
        StepEvent.GIVEN_UP: StepState.VOID,
    },
    StepState.VOID: {
        StepEvent.UNDONE: StepState.CLOSED,
        StepEvent.RAISED: StepState.FAILED,
    },
    StepState.FAILED: {},
}

ENDS_OPERATIONS = frozenset({StepState.VOID, StepState.FAILED})
"""States in which operations end at once."""


class UnfinishedStep:
    """Thread-safe. ``on_break`` is called once for each suspension, in any thread."""

    def __init__(self, groups: Groups, calls: CallCounter) -> None:
        """``groups``: those of the worker, whose operations make the step; ``calls``: theirs."""
        self._groups, self._calls = groups, calls
        self.on_break: Callable[[], None] | None = None
        """Set once, by the worker that can finish steps; without it no step is suspended."""
        self.has_begun = False
        """Whether the script has come to a step yet."""
        self._changed = threading.Condition()
        self._state = StepState.CLOSED
        self._running = 0
        """Operations that are neither complete nor waiting."""
        self._resumed = 0
        """How often a step has gone on."""
        self._voted_at = 0
        """How many operations were called up to the latest vote."""
        self._between = 0
        """How many were called between that vote and the beginning of the present step."""
        self._left_epoch = 0
        """The latest epoch that this worker has left."""

    @property
    def state(self) -> StepState:
        return self._state

    @property
    def suspended(self) -> bool:
        return self._state is StepState.SUSPENDED

    def _move(self, event: StepEvent) -> None:
        """Apply ``event``. The caller holds the lock."""
        refusal = f"'{event}' cannot happen to a step that is {self._state}"
        self._state = next_state(TABLE, self._state, event, refusal)
        self._changed.notify_all()

    def _await_decision(self) -> None:
        """Wait while the step is suspended. The caller holds the lock."""
        self._changed.wait_for(lambda: self._state is not StepState.SUSPENDED)

    # --- main thread ---------------------------------------------------------------------------

    def begin(self, *, keeps: bool) -> None:
        """A step begins, or the script tries one again in the same batch.

        ``keeps``: whether to keep what it takes to finish it after a loss. Nothing is kept if an
        operation of an earlier step still runs.
        """
        self.has_begun = True
        if self.end():
            return  # another attempt in the batch of a void step
        self._between = self._calls.begun - self._voted_at
        if self._groups.begin_step(keeps=keeps):
            with self._changed:
                self._move(StepEvent.BEGUN)

    def is_void(self) -> bool:
        """Whether the step will be repeated; waits while that is not known."""
        with self._changed:
            self._await_decision()
            return self._state in ENDS_OPERATIONS

    def come_to_vote(self) -> bool:
        """End the step once the collectives that were called in it are complete: one that broke
        after the vote would give a committed step garbage. Returns whether it is void."""
        self._groups.rest()
        return self.end()

    def end(self) -> bool:
        """End the step; waits while it is suspended. Returns whether it is void."""
        with self._changed:
            self._await_decision()
            if self._state is StepState.OPEN:
                self._move(StepEvent.ENDED)
            return self._state in ENDS_OPERATIONS

    def fail(self) -> None:
        """The script has left the step with an error, and its process is about to end. What the
        script calls on its way there, such as a barrier in a ``finally``, must neither wait for
        the other ranks nor meet an operation of theirs."""
        with self._changed:
            self._await_decision()
            if self._state is not StepState.FAILED:
                self._move(StepEvent.RAISED)

    def voted(self) -> None:
        """The step, which has ended, will be committed."""
        self._voted_at = self._calls.begun

    def leave_behind(self) -> None:
        """The script has come to its next batch: nothing of a void step may run from now on.

        Raises LinkError if one of its operations still runs after :data:`DRAIN_S`.
        """
        if self.end() and self._state is StepState.VOID:
            self._groups.drain(DRAIN_S)
            with self._changed:
                self._move(StepEvent.UNDONE)

    # --- threads of operations -----------------------------------------------------------------

    def enter(self) -> bool:
        """An operation begins; waits while the step is suspended. ``False``: the step is void."""
        with self._changed:
            self._await_decision()
            if self._state in ENDS_OPERATIONS:
                return False
            self._running += 1
            return True

    def leave(self) -> None:
        """The operation of :meth:`enter` is complete."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def again(self) -> bool:
        """The operation of :meth:`enter` broke: wait; returns whether to run it again."""
        self._suspend()
        with self._changed:
            self._running -= 1
            before = self._resumed
            self._changed.notify_all()
            self._await_decision()
            self._running += 1
            return self._state is StepState.OPEN and self._resumed > before

    def broke(self, epoch: int) -> None:
        """A rank of ``epoch`` was lost: suspend the step, if it is open.

        A thread may find the loss late, when this worker has left ``epoch`` and goes on without
        that rank. Such a loss changes nothing.
        """
        self._suspend(epoch)

    def _suspend(self, epoch: int | None = None) -> None:
        with self._changed:
            if epoch is not None and epoch <= self._left_epoch:
                return
            if self._state is not StepState.OPEN or self.on_break is None:
                return
            self._move(StepEvent.BROKE)
        self.on_break()

    def leave_epoch(self, epoch: int) -> None:
        """From now on no loss of ``epoch``, or of an earlier one, concerns the step."""
        self._groups.expect({})
        with self._changed:
            self._left_epoch = max(self._left_epoch, epoch)

    # --- the thread that decides ---------------------------------------------------------------

    def at_rest(self, seconds: float) -> None:
        """Wait until no operation runs. Raises LinkError after ``seconds``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._running == 0, seconds):
                raise LinkError("an operation of the broken step is still running")

    @property
    def nbytes(self) -> int:
        """Bytes of host memory for what is kept."""
        return self._groups.kept_bytes

    @property
    def can_go_on(self) -> bool:
        """Whether all operations of the step were collectives. Call it while none runs."""
        progress = self._groups.progress.values()
        return bool(progress) and all(group.kept >= 0 for group in progress)

    def place(self, step: int) -> Place:
        """How far each group has come in ``step``. Call it while no operation runs."""
        return Place(step, self._groups.progress, between=self._between)

    def place_before(self, step: int) -> Place:
        """The same if this worker has yet to begin ``step``."""
        nothing = {name: Progress() for name in self._groups.progress}
        return Place(step, nothing, afresh=True, between=self._calls.begun - self._voted_at)

    def go_back(self, again: Mapping[str, Rerun]) -> None:
        """Run the complete ones of these operations again, before any other operation: other ranks
        lack them."""
        self._groups.go_back(again)

    def expect(self, again: Mapping[str, Rerun]) -> None:
        """Other ranks are in the step that this worker begins next, and run these operations
        again."""
        self._groups.expect(again)

    def resume(self) -> None:
        """Let the operations run again, in the new epoch, unless the step was given up."""
        with self._changed:
            if self._state is StepState.SUSPENDED:
                self._resumed += 1
                self._move(StepEvent.RESUMED)

    def give_up(self) -> None:
        """Let the operations of a suspended step end without a result."""
        with self._changed:
            if self._state is StepState.SUSPENDED:
                self._groups.begin_step(keeps=False)
                self._move(StepEvent.GIVEN_UP)

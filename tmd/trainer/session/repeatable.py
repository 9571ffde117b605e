"""Collectives between two steps, such as an evaluation, that outlive the loss of a rank.

They are voted on like a step and count as one, so that after a loss all ranks know whether they
have run. The data position says which of them is due, so that the worker that takes a lost rank
runs it, too: in a loop before its first batch, since its script never came to the call; after a
loop where its script calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from tmd.trainer.session.step import Step, StepResult
from tmd.trainer.session.step_cycle import StepCycle
from tmd.trainer.state.data import Feed

T = TypeVar("T")

log = logging.getLogger("tmd.trainer")


class Repeatable(NamedTuple, Generic[T]):
    """A function that is run again if a rank is lost in it."""

    name: str
    run: Callable[[], T]
    then: Callable[[T], object] | None
    """Called with the result after the vote, on every worker that holds a rank."""


class Repeatables:
    """Runs the functions that the script has made repeatable.

    ``boundary`` does what can only be done between two steps; it returns false if the present
    ``batches()`` call has to end. ``begin`` begins a step: it seeds it, and begins a checkpoint.
    """

    def __init__(
        self, cycle: StepCycle, boundary: Callable[[], bool], begin: Callable[[], None]
    ) -> None:
        self._cycle, self._boundary, self._begin = cycle, boundary, begin
        self.known: dict[str, Repeatable[Any]] = {}
        """All repeatable functions by name."""
        self.begun = False
        """Whether a ``batches()`` call has begun."""
        self._ran = False
        """Whether one has run since the latest batch was given out, or since the loop ended."""
        self._binds = False
        """Whether nothing may change before the next batch."""
        self.failed = False
        """Whether one has raised an error in a loop, and no batch has followed."""

    def add(self, each: Repeatable[Any]) -> Callable[[], None]:
        """Returns what the script calls.

        Raises:
            ValueError: the name is missing or taken.
            RuntimeError: a ``batches()`` call has begun.
        """
        if self.begun:
            raise RuntimeError("call session.repeatable() before session.batches()")
        if not each.name or each.name in self.known:
            raise ValueError(
                f"session.repeatable(): the name {each.name!r} is empty or taken: pass another "
                "name=..., the same on all ranks"
            )
        self.known[each.name] = each
        return partial(self._call, each.name)

    def ready(self) -> None:
        """A batch was given out, or a loop has ended: one of the functions may run after it."""
        self.broken_off()
        self.failed = False

    def broken_off(self) -> None:
        """The script has left a loop: one of the functions may run after it."""
        self._ran = self._binds = False

    def warn_of_break(self) -> None:
        """The script leaves a loop after a step, and there may have been a function in between."""
        if self._binds and self._cycle.hooks.rank == 0:
            log.warning(
                "the script has left the loop over session.batches() right after a function of "
                "session.repeatable(). If a rank is lost in that function, its new worker does not "
                "run this break: it goes on with the next batch, while the other ranks have left. "
                "Check at the top of the loop's body whether to leave it"
            )

    def check_unchanged(self) -> None:
        """Before a batch: a joiner does not run the code between a function in the loop and that.

        Raises:
            RuntimeError: that code has changed a registered object.
        """
        if self._binds and not self._cycle.spoilt and self._cycle.has_changed():
            raise RuntimeError(
                "a registered object has changed between a function of session.repeatable() and "
                "the next batch, which a worker that joins in that function would miss: change it "
                "before the call, or in the function"
            )

    def _call(self, name: str) -> None:
        """The script calls the function ``name``.

        Raises:
            RuntimeError: not between a step and the next batch, or the second one there.
        """
        feed = self._cycle.feed
        self._cycle.error.check()
        if not self.begun or self._cycle.is_open:
            raise RuntimeError(
                f"call {name}() between two steps, inside or after session.batches()"
            )
        if feed is None or self._cycle.spoilt or self._cycle.hooks.idle:
            return
        if feed.broken_off and not feed.closed:
            feed.close()  # a worker that joins in this function goes on behind the loop, too
        if feed.left:
            if feed.due != name:
                return
            # The rank had run the code since the loop before its state was copied.
            self._cycle.take_back()
        elif feed.drawn or self._ran:
            raise RuntimeError(
                f"{name}() belongs after a step and before the next batch, once: put all that runs "
                "there into one function of session.repeatable()"
            )
        feed.due = name
        if not (self._boundary() and self.run_due(feed)):
            feed.due = ""

    def run_due(self, feed: Feed) -> bool:
        """At a boundary: run what is due, unless this worker is idle or the job ends.

        Returns false if the ``batches()`` call has to end instead.
        """
        hooks = self._cycle.hooks
        while feed.due and not (hooks.idle or hooks.finishing):
            if self._attempt(self._named(feed.due), feed):
                return True
            if not self._boundary():
                return False
        feed.due = ""
        return True

    def _attempt(self, each: Repeatable[T], feed: Feed) -> bool:
        """Returns whether it was committed, or run by a shadow."""
        self._begin()
        try:
            with Step(self._cycle, trains=False) as step:
                result = each.run()
        except BaseException as error:
            feed.due = ""
            # The script may go on without it. If it does not, training is not over.
            self.failed = isinstance(error, Exception) and not feed.closed
            raise
        if step.result is StepResult.SPOILT:
            return False
        feed.due, self._ran, self.failed = "", True, False
        feed.left, feed.ended = False, feed.closed
        self._binds = not feed.closed  # after a loop a joiner runs what follows
        if self._binds:
            self._cycle.keep()
        if step.counts and each.then is not None:
            try:
                each.then(result)
            except Exception:
                self.failed = not feed.closed
                raise
        return True

    def _named(self, name: str) -> Repeatable[Any]:
        if name not in self.known:
            raise RuntimeError(
                f"the other ranks run {name!r} now: every worker must call session.repeatable() "
                "for it before batches()"
            )
        return self.known[name]

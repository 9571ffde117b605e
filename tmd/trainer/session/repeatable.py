"""Collectives between two steps, such as an evaluation, that outlive the loss of a rank.

They are voted on like a step and count as one, so that after a loss all ranks know whether they
have run. The data position names the function that is due, so that a replacement worker runs it as
well. In a loop, ``batches()`` runs it before the first batch, because the script has not reached
the call. After a loop, the script's own call runs it.
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
    ``batches()`` call must end. ``begin`` seeds the next step and may start a checkpoint.
    """

    def __init__(
        self, cycle: StepCycle, boundary: Callable[[], bool], begin: Callable[[], None]
    ) -> None:
        self._cycle, self._boundary, self._begin = cycle, boundary, begin
        self.known: dict[str, Repeatable[Any]] = {}
        """All repeatable functions by name."""
        self.in_batches = False
        """Whether a ``batches()`` call has begun."""
        self._ran = False
        """Whether a function has run since the latest batch, or since the loop ended."""
        self._frozen = False
        """Whether no registered object may change before the next batch."""
        self.failed = False
        """Whether a function has raised an error in a loop, and no batch has followed."""

    def add(self, each: Repeatable[Any]) -> Callable[[], None]:
        """Returns what the script calls.

        Raises:
            ValueError: the name is missing or taken.
            RuntimeError: a ``batches()`` call has begun.
        """
        if self.in_batches:
            raise RuntimeError("call session.repeatable() before session.batches()")
        if not each.name or each.name in self.known:
            raise ValueError(
                f"session.repeatable(): the name {each.name!r} is empty or taken: pass another "
                "name=..., the same on all ranks"
            )
        self.known[each.name] = each
        return partial(self._call, each.name)

    def open_gap(self) -> None:
        """A batch was given out, or a loop has ended: one of the functions may run after it."""
        self.left_loop()
        self.failed = False

    def left_loop(self) -> None:
        """The script has left a loop by ``break``: one of the functions may run after it."""
        self._ran = self._frozen = False

    def warn_of_break(self) -> None:
        """The script leaves a loop by ``break``: warn if a function has run since the latest
        step."""
        if self._frozen and self._cycle.hooks.rank == 0:
            log.warning(
                "the script has left the loop over session.batches() right after a function of "
                "session.repeatable(). If a rank is lost in that function, the worker that "
                "replaces it never reaches this break: it continues with the next batch while the "
                "other ranks have left the loop. Check at the top of the loop's body whether to "
                "leave it"
            )

    def check_unchanged(self) -> None:
        """Before a batch: refuse changes that were made since a function in the loop. A joiner does
        not run that code.

        Raises:
            RuntimeError: a registered object has changed.
        """
        if self._frozen and not self._cycle.spoilt and self._cycle.has_changed():
            raise RuntimeError(
                "a registered object has changed between a function of session.repeatable() and "
                "the next batch. A worker that joins during that function misses the change: make "
                "it before the call, or in the function"
            )

    def _call(self, name: str) -> None:
        """The script calls the function ``name``.

        Raises:
            RuntimeError: the call is not between two steps, or is the second one between the same
                two.
        """
        feed = self._cycle.feed
        self._cycle.error.check()
        if not self.in_batches or self._cycle.is_open:
            raise RuntimeError(
                f"call {name}() between two steps, inside or after session.batches()"
            )
        if feed is None or self._cycle.spoilt or self._cycle.hooks.idle:
            return
        if feed.broken_off and not feed.closed:
            feed.close()  # a worker that joins during this function continues after the loop, too
        if feed.left:
            if feed.due != name:
                return
            # The copied state includes what the code after the loop has changed, and the script
            # has just run that code here, too.
            self._cycle.take_back()
        elif feed.drawn or self._ran:
            raise RuntimeError(
                f"call {name}() once between a step and the next batch, or after the loop: put all "
                "that runs there into one function of session.repeatable()"
            )
        feed.due = name
        if not (self._boundary() and self.run_due(feed)):
            feed.due = ""

    def run_due(self, feed: Feed) -> bool:
        """At a boundary: run what is due, unless this worker is idle or the job ends.

        Returns false if the ``batches()`` call must end.
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
        """Returns false if the run is spoilt, and must be repeated."""
        self._begin()
        try:
            with Step(self._cycle, trains=False) as step:
                result = each.run()
        except BaseException as error:
            feed.due = ""
            # The script may catch the error and continue. Else it ends, and training is not over.
            self.failed = isinstance(error, Exception) and not feed.closed
            raise
        if step.result is StepResult.SPOILT:
            return False
        feed.due, self._ran, self.failed = "", True, False
        feed.left, feed.ended = False, feed.closed
        # After a loop a joiner runs the code that follows, which may change objects.
        self._frozen = not feed.closed
        if self._frozen:
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

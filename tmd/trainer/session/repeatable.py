"""Collectives between two steps, such as an evaluation, that outlive the loss of a rank.

They are voted on like a step and count as one, so that after a loss all ranks know whether they
have run. The data position says which of them is due, so that the worker that takes a lost rank
runs it, too, though its script never came to the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from tmd.trainer.session.step import Step, StepResult
from tmd.trainer.session.step_cycle import StepCycle
from tmd.trainer.state.data import Feed

T = TypeVar("T")


class Repeatable(NamedTuple, Generic[T]):
    """A function that is run again if a rank is lost in it."""

    name: str
    run: Callable[[], T]
    then: Callable[[T], object] | None
    """Called once with the result, on every worker that holds a rank."""


class Repeatables:
    """Runs the functions that the script has made repeatable.

    ``boundary`` does what can only be done between two steps; it returns false if the present
    ``batches()`` call has to end. ``seed`` seeds the random numbers of the step.
    """

    def __init__(
        self, cycle: StepCycle, boundary: Callable[[], bool], seed: Callable[[], None]
    ) -> None:
        self._cycle, self._boundary, self._seed = cycle, boundary, seed
        self._known: dict[str, Repeatable[Any]] = {}
        self.may_run = False
        """Whether a ``batches()`` call has begun."""
        self._ran = False
        """Whether one has run since the latest batch was given out."""

    def add(self, each: Repeatable[Any]) -> Callable[[], None]:
        """Returns what the script calls.

        Raises:
            ValueError: the name is taken.
            RuntimeError: a ``batches()`` call has begun.
        """
        if self.may_run:
            raise RuntimeError("call session.repeatable() before session.batches()")
        if each.name in self._known:
            raise ValueError(
                f"session.repeatable() got two functions of the name {each.name!r}: pass another "
                "name=..., the same on all ranks"
            )
        self._known[each.name] = each
        return partial(self._call, each.name)

    def passed(self) -> None:
        """A batch is given out, or a loop has ended: after it one of the functions may run."""
        self._ran = False

    def _call(self, name: str) -> None:
        """The script calls the function ``name``.

        Raises:
            RuntimeError: not between a step and the next batch, or the second one there.
        """
        if not self.may_run:
            raise RuntimeError(f"call {name}() inside or after session.batches()")
        feed = self._cycle.feed
        if feed is None or feed.left or self._cycle.spoilt or self._cycle.hooks.idle:
            return
        self._cycle.check_ended()
        if feed.drawn or self._ran:
            raise RuntimeError(
                f"{name}() belongs after a step and before the next batch, once: put all that runs "
                "there into one function of session.repeatable()"
            )
        feed.due = name
        if not (self._boundary() and self.run_due(feed)):
            feed.due = ""

    def run_due(self, feed: Feed) -> bool:
        """At a boundary: run what is due, if anything.

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
        self._seed()
        with Step(self._cycle, trains=False) as step:
            result = each.run()
        if step.result is StepResult.SPOILT:
            return False
        feed.due, self._ran = "", True
        if step.counts and each.then is not None:
            each.then(result)
        return True

    def _named(self, name: str) -> Repeatable[Any]:
        if name not in self._known:
            raise RuntimeError(
                f"the other ranks run {name!r} now: every worker must call session.repeatable() "
                "for it before batches()"
            )
        return self._known[name]

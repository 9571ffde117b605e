"""The loop over batches: what happens at each boundary between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tmd.core.values.checkpoints import REFUSED, name_of
from tmd.core.values.errors import StateMismatch
from tmd.trainer.session.repeatable import Repeatables
from tmd.trainer.session.step_cycle import StepCycle
from tmd.trainer.state.data import Feed
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.placing import DataPlace, Loader, refuse_one_shot, undivided
from tmd.trainer.state.seeds import seed_all

if TYPE_CHECKING:
    from tmd.trainer.checkpoints.saving import Saving


class BatchLoop:
    """All ``batches()`` calls of a session, one after the other.

    Args:
        cycle: takes each step from beginning to end.
        base: returns the seed of the rank held now.
        place: returns the part of the data that belongs to that rank.
    """

    def __init__(
        self, cycle: StepCycle, base: Callable[[], int], place: Callable[[], DataPlace]
    ) -> None:
        self._cycle, self._hooks = cycle, cycle.hooks
        self._base, self._place = base, place
        self.repeatables = Repeatables(cycle, self._boundary, self._begin)
        self.saving: Saving | None = None
        """Checkpoints, if the script asks for them."""
        self.feed: Feed | None = None
        """Of the latest call that was entered."""
        self.calls = 0
        """Number of calls so far."""
        self._latest: Feed | None = None

    def run(
        self, loader: Loader, local: LocalState, accumulate: int, partial: bool
    ) -> Iterator[Any]:
        """As :meth:`tmd.trainer.Session.batches`."""
        refuse_one_shot(loader)
        if why := undivided(loader) or self._unshared:
            self._hooks.adoption.refuse(why)
        feed = Feed(loader, self.calls, self._base, self._place)
        try:
            yield from self._batches(feed, local, accumulate, partial)
        except Exception as error:
            self._cycle.error.leave_loop(error)
            raise

    def _batches(
        self, feed: Feed, local: LocalState, accumulate: int, partial: bool
    ) -> Iterator[Any]:
        if not self._enter(feed, local):
            return
        while self._stays(feed):
            try:
                drawn = self._drawn(feed, accumulate, partial=partial)
            except StopIteration:
                feed.rewind()  # what is left is too little for a step
                self._save_end(feed)
                if self._hooks.close_feed(feed, local):
                    feed.ended = True
                    self.repeatables.open_gap()
                    return
                continue
            if self._hooks.finishing:
                raise RuntimeError(
                    "another rank has ended training while this rank has batches left: every rank "
                    "must run the same number of steps"
                )
            try:
                yield from self._given(drawn, several=accumulate > 1)
            except GeneratorExit:
                if self._latest is feed:  # else the script has kept it alive into the next loop
                    self._broken_off(feed)
                raise

    def _drawn(self, feed: Feed, count: int, *, partial: bool) -> dict[int, list[Any]]:
        """The batches of the next step, by rank, for each rank that this worker holds.

        Raises:
            StopIteration: there are none.
            RuntimeError: there are none for an adopted rank.
        """
        passes, status = self._hooks.adoption.ranks, self._hooks.status
        if len(passes) < 2:
            feed.drop_beside()
            return {self._hooks.rank: feed.several(status.step, count, partial=partial)}
        found = {}
        try:
            for rank in sorted(passes, key=lambda r: r != status.rank):
                self._hooks.adoption.draw_for(rank)
                own = rank == status.rank
                try:
                    each = feed if own else feed.beside(rank)
                    found[rank] = each.several(status.step, count, partial=partial)
                except StopIteration:
                    if own:
                        raise
                    raise RuntimeError(
                        f"rank {rank}, which this worker has adopted, has no batches left, and "
                        f"rank {status.rank} has: every rank must run the same number of steps"
                    ) from None
        finally:
            self._hooks.adoption.leave_step()  # behind the loop a script sees the lowest rank
        return {rank: found[rank] for rank in passes}

    def _given(self, drawn: dict[int, list[Any]], *, several: bool) -> Iterator[Any]:
        """Yield the batches of each rank in turn, and stop after a pass that broke."""
        last = next(reversed(drawn))
        for number, (rank, batches) in enumerate(drawn.items()):
            if len(drawn) > 1:
                self._cycle.begin_pass(rank, first=number == 0, last=rank == last)
            self._begin()
            self.repeatables.open_gap()
            self._cycle.in_body = True
            try:
                yield batches if several else batches[0]
            finally:
                self._cycle.in_body = False
            if self._cycle.spoilt:
                return

    @property
    def skipped(self) -> bool:
        """Whether the latest call did not run to its end here."""
        return self._latest is not None and not self._latest.ended

    @property
    def why_not_done(self) -> str:
        """Why training cannot be over for this rank, in words; empty if it can."""
        if self.repeatables.failed:
            return "the script ends after an error in a function of session.repeatable()"
        return self._cycle.why_not_done

    @property
    def _unshared(self) -> str:
        """What of this session keeps a worker from computing for several ranks."""
        if self.saving is not None:
            return "it uses session.checkpoint()"
        return "it uses session.repeatable()" if self.repeatables.known else ""

    def settle(self, torn: bool = False) -> None:
        """Copy what a checkpoint has not copied yet. ``torn``: the state may have changed
        already."""
        if self.saving is not None:
            self.saving.checkpoints.settle(torn=torn)

    def _enter(self, feed: Feed, local: LocalState) -> bool:
        """Begin a call; False if the checkpoint to resume from is in a later one.

        Raises:
            RuntimeError: the script has left the previous loop where it must not.
            StateMismatch: the checkpoint belongs to another script.
        """
        if self._cycle.spoilt:
            raise RuntimeError(
                "a loop over session.batches() was left by 'break' after a step that broke, whose "
                "batch would have come again: ask step.counts before the break"
            )
        if (before := self.feed) is not None and before.left and before.due:
            raise RuntimeError(
                f"{before.due}() was not called after the loop, but the other ranks run it there: "
                "call it whether or not session.skipped"
            )
        if before is not None and not before.over:
            self._broken_off(before)  # by `break`, and the script has kept the loop alive
        self._cycle.in_body = False  # of an earlier loop, which the script has kept alive
        self.calls += 1
        self._latest, self.repeatables.in_batches = feed, True
        if self.saving is not None and self.saving.skips(feed.call):
            feed.leave()
            return False
        self.feed = self._cycle.feed = feed
        self._hooks.follow(feed)
        step = None
        if self.saving is not None:
            step = self.saving.go_on(feed, local, self._hooks.rank, self._base())
        if step is not None:
            if feed.due and feed.due not in self.repeatables.known:
                raise StateMismatch(
                    f"the checkpoint of step {step} was taken before {feed.due}(), a function of "
                    "session.repeatable() that this script does not have: give one that name, or "
                    f"rename the folder {name_of(step)} to {name_of(step)}{REFUSED} to resume from "
                    "the checkpoint before"
                )
            self._hooks.resumed(step, local)
        return True

    def _stays(self, feed: Feed) -> bool:
        """Before a batch: run what is due. Returns whether this worker stays in the call.

        Raises:
            RuntimeError: another call has begun meanwhile.
        """
        if self._latest is not feed:
            raise RuntimeError(
                "a loop over session.batches() went on after another one had begun: after a lost "
                "rank or a move only the batches of one of them would be right. Pass one loader "
                "that gives the batches of both, and count epochs by range()"
            )
        self._cycle.check_ended()
        self.repeatables.check_unchanged()
        while self._boundary():
            if not feed.due:
                return True
            if feed.closed:
                # The script runs it where it calls it, behind the loop.
                self._cycle.keep(loose=True)
                break
            if not self.repeatables.run_due(feed):
                break
        else:
            feed.due = ""  # the rank that this worker takes is already past it
        feed.leave()
        self.repeatables.open_gap()  # what the script does after the loop does not concern the rank
        return False

    def _broken_off(self, feed: Feed) -> None:
        """The script has left the loop by ``break``, on all ranks after the same step."""
        self._hooks.adoption.leave_step()
        if self._cycle.spoilt:
            return
        self.settle()
        if not self._hooks.idle:
            self._hooks.left_loop(feed)
        if feed.drawn:
            feed.rewind()  # no step was made of what it got last
            feed.broken_off = True  # unless an error ends the script
            feed.count_iteration()  # as a worker does that leaves out this call
            return
        self.repeatables.warn_of_break()
        feed.close()
        self.repeatables.left_loop()

    def _save_end(self, feed: Feed) -> None:
        """If the script asks for it, take a checkpoint of the end of the call."""
        hooks = self._hooks
        if self.saving is None or hooks.shadowing or hooks.idle or hooks.finishing:
            return
        place = (hooks.status.step, feed.checkpoint_position, hooks.rank, self._base())
        self.saving.checkpoints.at_end(*place, lambda: hooks.health.known_broken)

    def _boundary(self) -> bool:
        """Between two steps. Returns false if the present call has to end."""
        self._cycle.at_boundary()
        self.settle()
        # A function of session.repeatable() may run in the body of the loop. What tmd does in its
        # boundary, such as an optimizer for a rank that this worker follows, is not the script's.
        inside, self._cycle.in_body = self._cycle.in_body, False
        try:
            return self._hooks.boundary()
        finally:
            self._cycle.in_body = inside

    def _begin(self) -> None:
        """A step begins: seed it, and begin to copy the state if a checkpoint is due."""
        assert self.feed is not None
        step, base = self._hooks.status.step, self._base()
        if self.saving is not None and not self._hooks.shadowing:
            place = (step, self.feed.checkpoint_position, self._hooks.rank, base)
            self.saving.checkpoints.at_boundary(*place)
            if self._cycle.moves or self.feed.due:
                # The step, or a function of the script, may change what is not copied yet.
                self.settle()
        seed_all(base, step, "step")

"""Snapshots of a unique state: taken every few steps, kept in the memory of two hosts.

All ranks take them at the same steps and report their stage in each vote, so that all agree when a
snapshot is complete. Only then is the previous one dropped. A failure ends only its own snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from tmd.core.planning.directives import Directive, Sync
from tmd.core.values.errors import LinkError, StateMismatch
from tmd.core.values.model import Member, Membership
from tmd.core.values.snapshots import Kept, is_due, keepers
from tmd.fabric import Link
from tmd.trainer.protocol.copies import StateCopy
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.protocol.outbox import Outbox, OutboxEntry
from tmd.trainer.snapshots.server import ENDING_S, SnapshotServer, call_on, fetched
from tmd.trainer.snapshots.store import SnapshotStore
from tmd.trainer.snapshots.writer import SnapshotWriter, WriterStage
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.obstacle import Rebuild

IN_VAIN = 3
"""Failed snapshots in a row after which a warning is logged."""

log = logging.getLogger("tmd.trainer")


class Snapshots:
    """Main thread or :class:`Continuation`; owns a thread that copies and sends. ``every`` 0 takes
    none."""

    def __init__(
        self, context: RankContext, every: int, tell: Callable[[tuple[Kept, ...]], None]
    ) -> None:
        self._fabric = fabric = context.fabric
        self._state = context.state
        self._fit = context.fit
        self._verification = context.verification
        self._units = context.units
        self._window = context.window
        self._rate = context.limits.copy_mb_s * 1e6
        self._every = every
        self._outbox = Outbox(1 << 62)
        self._sizes: frozenset[int] = frozenset()
        """Sizes of the pieces of the latest copy; only buffers of these sizes are reused."""
        self._store = SnapshotStore(tell, self._freed)
        self._place = (-1, -1)
        """Epoch and ``batches()`` call of the latest boundary."""
        self._put_off = False
        """Whether one is due at the next boundary, since it was at this one."""
        self._taking: SnapshotWriter | None = None
        self._begun: SnapshotWriter | None = None
        """``_taking`` until the sender's thread has picked it up."""
        self._vain = 0
        self._announced = False
        self._skipped = (-1, -1)
        """Epoch and step of the latest boundary at which none may be taken."""
        self._link: tuple[Member, Link] | None = None
        self._errand: tuple[Directive, Link] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tmd-snapshots", daemon=True)
        if every:
            self._door = SnapshotServer(fabric, self._store, self._offer)
            self._thread.start()

    # --- at every step ----------------------------------------------------------------------------

    def at_boundary(self, step: int) -> None:
        """``step`` begins; the parameters do not change until the window is closed."""
        membership, feed = self._fabric.membership, self._state.feed
        if not self._every or membership is None or feed is None or feed.closed:
            return
        if (membership.epoch, step) == self._skipped:
            return
        place = (membership.epoch, feed.position.call)
        fresh = place != self._place
        if fresh:
            self.give_up()
        due = self._put_off or is_due(step, self._every, fresh=fresh)
        # A function of session.repeatable() may exchange the weights for a while.
        self._put_off = due and bool(feed.due)
        if self._put_off:
            return
        self._place = place
        if self._taking is None and due:
            self._begin(step, membership, warn=fresh)

    def skip(self, step: int) -> None:
        """Take none at the boundary before ``step``, to which the other ranks do not come in this
        epoch."""
        if (membership := self._fabric.membership) is not None:
            self._skipped = (membership.epoch, step)

    def _begin(self, step: int, membership: Membership, *, warn: bool) -> None:
        rank = self._fabric.rank
        assert rank is not None
        assert self._state.feed is not None
        hosts = [member.host for member in membership.members]
        if warn and rank == 0:
            self._announce(hosts)
        keeper, verdict = (
            membership.members[keepers(hosts)[rank]],
            self._verification.later(),
        )
        stored = self._store.get(rank, step) if step == self._store.whole else None
        taking = SnapshotWriter(rank, step, keeper, verdict, stored)
        with self._harmless(taking):
            if why := self._units.stale:
                raise StateMismatch(why)
            if stored is None:
                taking.begin(self._state.feed.position, self._units, self._outbox)
        self._window.open(step)
        with self._changed:
            self._taking = self._begun = taking
            self._changed.notify_all()

    def _announce(self, hosts: Sequence[str]) -> None:
        """Log once for the job, and again only if copies lack protection."""
        if not self._announced:
            self._announced = True
            log.warning(
                "snapshots every %d steps in the memory of two hosts each, since some state has no "
                "replica or the script asks for them; register(snapshots=0) turns them off",
                self._every,
            )
        if len(set(hosts)) == 1:
            log.warning("all ranks are on one host: snapshots will not survive its loss")

    def ballot(self, step: int, *, torn: bool) -> int:
        """What this rank adds to the vote: the stage of its snapshot. ``torn``: ``step`` has
        changed parameters of which threads may have read other values than those of its start."""
        if (taking := self._taking) is None:
            return WriterStage.DONE
        taking.torn |= torn and taking.step == step and taking.stored is None
        return WriterStage.FAILED if taking.torn else taking.stage

    def voted(self, least: int) -> None:
        """Apply the vote's result: the stage of the slowest rank, equal on every rank."""
        taking = self._taking
        if taking is None or least == WriterStage.GOING:
            return
        self.give_up()
        if least == WriterStage.DONE:
            self._vain = 0
            self._store.keep_only(taking.step)
            return
        self._vain += 1
        if self._vain == IN_VAIN:
            log.warning("%d snapshots in a row were given up, on this rank or another", IN_VAIN)
        self._store.drop(taking.step)

    def give_up(self) -> None:
        """Cancel the current snapshot; stored copies remain."""
        with self._changed:
            taking, self._taking, self._begun = self._taking, None, None
        if taking is not None:
            taking.over.set()
            if taking.stage is WriterStage.GOING and self._link is not None:
                # The sender may wait for a keeper that has died.
                self._link[1].close()

    def forget(self) -> None:
        """Forget the role in snapshots after this worker has handed over its rank."""
        self.give_up()
        self._store.clear()

    def call_over(self, call: int) -> None:
        """Drop copies of ``batches()`` calls before ``call``."""
        self.give_up()
        self._store.begin_call(call)

    def close(self) -> None:
        """Stop the threads, since none may be inside torch when the process ends."""
        if not self._every:
            return
        self.give_up()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._hang_up()
        self._door.close()
        self._thread.join(ENDING_S)

    # --- after a loss -----------------------------------------------------------------------------

    def only(self, whole: int | None) -> None:
        """After a loss: keep only the newest complete snapshot, as reported by the leader."""
        if whole is not None:
            self._store.keep_only(whole)

    def fetch(self, directive: Sync, wanted: Callable[[], bool]) -> Rebuild | None:
        """Joiner: have the copy of the rank to go back to, from its keeper if it is not here.

        Returns the rebuild that must come first, if any.

        Raises:
            LinkError: the keeper is gone, or the directive has changed.
            StateMismatch: the copy does not fit, or other bytes arrived than were sent.
        """
        source = next((m.source for m in directive.moves if m.rank == directive.rank), None)
        if self._store.get(directive.rank, directive.resume) is not None:
            return None
        if source is None:
            raise LinkError(
                f"no worker has the copy of rank {directive.rank} at step {directive.resume}"
            )
        link = call_on(self._fabric, source)
        self._errand = (directive, link)
        try:
            if not wanted():
                raise LinkError("the directive has changed")
            copy = fetched(
                link,
                directive.rank,
                directive.resume,
                lambda o: self._fit.adopted(directive.rank, o),
            )
        finally:
            self._errand = None
            link.close()
        if isinstance(copy, Rebuild):
            return copy
        if not self._store.put(copy):
            raise StateMismatch(
                f"the copy of step {directive.resume} is of a loop over session.batches() that "
                "this worker has left, so that it cannot take the rank"
            )
        return None

    def cancel_unless(self, directive: Directive) -> None:
        """Cancel a fetch for another directive (any thread)."""
        errand = self._errand
        if errand is not None and errand[0] != directive:
            errand[1].close()

    def is_ahead(self, directive: Sync) -> bool:
        """Whether the position to roll back to is in a later ``batches()`` call."""
        copy, feed = self._copy(directive), self._state.feed
        return feed is not None and copy.position.call > feed.call

    def put_back(self, directive: Sync) -> None:
        """Restore the rank of ``directive`` as of the start of its resume step.

        Raises:
            StateMismatch: the copy is missing or damaged.
        """
        copy = self._copy(directive)
        copy.check()
        self._state.put_back(copy)
        self.only(copy.step)
        log.warning("rank %d: rolled back to step %d", copy.rank, copy.step)

    def _copy(self, directive: Sync) -> StateCopy:
        copy = self._store.get(directive.rank, directive.resume)
        if copy is None:
            raise StateMismatch(
                f"no copy of rank {directive.rank} at step {directive.resume} is here"
            )
        return copy

    # --- the sender's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while (taking := self._next()) is not None:
            with self._harmless(taking):
                self._take(taking)

    def _next(self) -> SnapshotWriter | None:
        """Wait for the next snapshot to work on; ``None`` at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._begun is not None)
            begun, self._begun = self._begun, None
            return None if self._closed else begun

    def _take(self, taking: SnapshotWriter) -> None:
        if (copy := self._copied(taking)) is None:
            return
        for attempt in ("the link of the previous snapshot", "a new one"):
            try:
                taking.bring(self._dialled(taking.keeper), copy, self._rate)
                return
            except LinkError as error:
                self._hang_up()
                if taking.over.is_set():
                    return
                log.debug("%s broke: %s", attempt, error)
        taking.fail(f"{taking.keeper.worker} cannot be reached")

    def _copied(self, taking: SnapshotWriter) -> StateCopy | None:
        """The copy to bring, which is stored here; ``None`` if it is given up."""
        if taking.stored is not None:
            return taking.stored
        entries = taking.copy(self._units, self._window, self._outbox)
        if why := taking.verdict():
            taking.fail(why)
        if taking.stage is WriterStage.FAILED:
            self._back(entries)
            return None
        copy = taking.made(self._state.layouts, entries)
        self._sizes = frozenset(body.numel() for _, body in entries)
        with self._changed:
            # Under the lock: after give_up() the other ranks may have dropped this step.
            kept = self._taking is taking and self._store.put(copy)
        if not kept:
            self._back(entries)
            return None
        return copy

    def _dialled(self, keeper: Member) -> Link:
        if self._link is None or self._link[0] != keeper or self._link[1].ended:
            self._hang_up()
            self._link = (keeper, call_on(self._fabric, keeper))
        return self._link[1]

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link[1].close()

    @contextlib.contextmanager
    def _harmless(self, taking: SnapshotWriter) -> Iterator[None]:
        """Keep errors of a snapshot from training."""
        try:
            yield
        except Exception as error:
            log.warning("no snapshot of step %d: %s", taking.step, error)
            taking.stage = WriterStage.FAILED

    # --- memory -----------------------------------------------------------------------------------

    def _offer(self, copy: StateCopy) -> Offer:
        return self._fit.offer(copy.layouts)

    def _freed(self, copy: StateCopy) -> None:
        if copy.rank == self._fabric.rank:
            self._back(copy.entries)

    def _back(self, entries: Sequence[OutboxEntry]) -> None:
        """Reuse the memory of own copies: fresh memory costs more than the copy."""
        for _, body in entries:
            if body.numel() in self._sizes:
                self._outbox.back(body)

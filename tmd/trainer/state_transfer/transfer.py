"""Copies the whole state of a rank from one worker to another while training stands still."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from tmd.core.planning.directives import Arm, Directive, Sync
from tmd.core.values.errors import LinkError, StateMismatch
from tmd.core.values.model import Member, Move
from tmd.fabric import Fabric, Link
from tmd.trainer.protocol.offers import StateHeader
from tmd.trainer.protocol.take_over import Takeover, state_purpose
from tmd.trainer.state_transfer import stream
from tmd.trainer.state_transfer.fit import Fit
from tmd.trainer.state_transfer.obstacle import NextLoop, Rebuild
from tmd.trainer.state_transfer.rank_state import RankState
from tmd.trainer.state_transfer.source_call import await_call, source_of
from tmd.trainer.state_transfer.verification import StateVerification

CONNECT_TIMEOUT_S = 10.0

log = logging.getLogger("tmd.trainer")


class StateTransfer:
    """Main thread or :class:`Continuation`, except :meth:`cancel_unless`."""

    def __init__(
        self, fabric: Fabric, state: RankState, fit: Fit, verification: StateVerification
    ) -> None:
        self._fabric = fabric
        self._state = state
        self._fit = fit
        self._verification = verification
        self._errand: tuple[Directive, Link] | None = None

    def cancel_unless(self, directive: Directive) -> None:
        """Cancel the running transfer if it belongs to another directive (any thread)."""
        self._verification.cancel_unless(directive)
        errand = self._errand
        if errand is not None and errand[0] != directive:
            errand[1].close()

    def send(
        self,
        directive: Arm | Sync,
        move: Move,
        step: int,
        wanted: Callable[[], bool],
        *,
        mid_step: bool = False,
    ) -> int:
        """Send the state of this rank at ``step`` to the joiner of ``move``; returns the bytes.

        ``wanted``: whether ``directive`` still holds; ``cancel_unless`` reports later changes.
        ``mid_step``: ``step`` is being computed, so that the state can only be compared.

        Raises:
            LinkError: the joiner is gone.
            StateMismatch: the joiner refused, or received other bytes than were sent; or this
                state is spoilt.
        """
        assert move.joiner is not None
        if why := self._state.resync.spoilt:
            raise StateMismatch(why)
        layouts, tensors = self._state.collect()
        # A joiner that shadowed a replica lacks only the leaver's local state.
        replica = isinstance(directive, Arm) and move.source not in (None, move.leaver)
        local = self._state.local.own() if replica else self._state.local.held(move.rank, step)
        if isinstance(directive, Sync) and not local and self._state.local.is_live:
            log.warning(
                "the local state of rank %d is lost: this rank's own is sent instead", move.rank
            )
        header = StateHeader(step, self._fit.offer(layouts), local, self._state.graded)
        purpose = state_purpose(directive, move.rank)
        link = self._fabric.connect(move.joiner, purpose, timeout=CONNECT_TIMEOUT_S)
        with self._running(directive, link) as owned:
            if not wanted():
                raise LinkError("the directive has changed")
            if stream.offer(link, header):
                digest = self._state.digest(step)
                if isinstance(directive, Sync):
                    owned.pop_all()
                    self._verification.verify_joiner(directive, link, digest)
                    return 0
                if stream.confirm(link, digest):
                    return 0
            if mid_step:
                raise LinkError(f"{link.peer} has not the state at the start of step {step}")
            return stream.send_tensors(link, tensors)

    @contextmanager
    def _running(self, directive: Directive, link: Link) -> Iterator[ExitStack]:
        """Closes ``link`` on another directive and at the end, unless ownership was passed on."""
        self._errand = (directive, link)
        with ExitStack() as owned:
            owned.callback(link.close)
            try:
                yield owned
            finally:
                self._errand = None

    def receive(
        self, takeover: Takeover, cancelled: Callable[[], bool], has_step: int | None = None
    ) -> Rebuild | NextLoop | None:
        """Take over the state and the data position, or return an obstacle.

        ``has_step``: the step at whose start this worker has shadowed the rank, or a replica. It
        lacks the local state. After a loss the state must be verified (``verification``).

        Raises:
            LinkError: the source is gone, or the take-over was cancelled.
            StateMismatch: the state does not fit, other bytes arrived than were sent, or the
                source refuses links of this worker.
        """
        if takeover.link is None or takeover.header is None:
            self._meet(takeover, cancelled, source_of(takeover.directive))
        link, header = takeover.link, takeover.header
        assert link is not None
        assert header is not None
        directive, offer = takeover.directive, header.offer
        refusal = self._fit.start_over(directive, offer) if isinstance(directive, Sync) else ""
        refusal = refusal or self._fit.adopted(takeover.rank, offer)
        if isinstance(refusal, Rebuild):
            return refusal
        if not refusal:
            if offer.position.call > self._state.call:
                return NextLoop()
            # Not before: the script may add groups between two calls.
            refusal = self._state.other_groups(offer.layouts)
        if refusal:
            stream.answer(link, refusal)
            link.close()
            raise StateMismatch(refusal)
        with self._running(directive, link) as owned:
            has = has_step == header.step
            stream.answer(link, has=has)
            if has and isinstance(directive, Sync):
                digest = self._state.digest(header.step)
                owned.pop_all()
                takeover.link = None
                self._verification.verify_own(directive, link, digest)
            elif not (has and stream.has_same(link, self._state.digest(header.step))):
                if has:
                    log.warning("the shadowed state is not that of the source: all of it is copied")
                self._state.place(offer.layouts, partial(stream.receive_tensors, link))
                self._state.grade(header.graded)
        self._state.adopt(header.local)
        takeover.timings["transfer"] = time.monotonic() - takeover.started
        return None

    def verify(self, takeover: Takeover, step: int, cancelled: Callable[[], bool]) -> None:
        """In the middle of ``step``: have the state that it began with compared with the source's.

        Raises:
            LinkError: the source is gone or is in another step, or the take-over was cancelled.
        """
        self._meet(takeover, cancelled)
        link, header, directive = takeover.link, takeover.header, takeover.directive
        assert link is not None
        assert header is not None
        assert isinstance(directive, Sync)
        with self._running(directive, link) as owned:
            if header.step != step:
                raise LinkError(f"{link.peer} is in step {header.step}, not {step}")
            stream.answer(link, has=True)
            owned.pop_all()
            self._verification.verify_own(directive, link, self._state.digest(step))

    def _meet(
        self, takeover: Takeover, cancelled: Callable[[], bool], source: Member | None = None
    ) -> None:
        purpose = state_purpose(takeover.directive, takeover.rank)
        link = await_call(self._fabric, purpose, source, cancelled)
        takeover.started = time.monotonic()
        try:
            header = stream.consider(link)
        except LinkError:
            # Otherwise the source would wait for an answer.
            link.close()
            raise
        takeover.link, takeover.header = link, header

"""Comparing two states beside the step that begins with them.

A joiner that has lived the life of the lost rank, or of a replica, has the state already, or so it
believes. It takes part in the first step of the new epoch on trust, with no vote in it and no copy
of its state for anybody, until its digest has equalled the source's (invariant I6): nobody waits
for digests of a large state, and nothing that is wrong is ever committed. If it cannot be proved
the step breaks, and the joiner is a standby like any other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tmd.core.planning.directives import Directive, Resume, Sync, Train
from tmd.core.values.reasons import in_words
from tmd.fabric import Link
from tmd.trainer.state.digests import Digest
from tmd.trainer.state_transfer import stream

PATIENCE_S = 120.0
"""For the other side's digest; whoever hangs for longer is not waited for."""
ENDING_S = 2.0

Verdict = Callable[[], str]
"""Waits until it is known whether a state is that of its rank: why it is not, or nothing."""

log = logging.getLogger("tmd.trainer")


class StateVerification:
    """Both sides. Owns a thread and a link for each comparison, which the main thread begins."""

    def __init__(self) -> None:
        self._own: _Comparison | None = None
        """Of the state that this worker has taken on trust, until it is given back."""
        self._others: tuple[_Comparison, ...] = ()
        """With joiners that have this worker's state."""

    def take(self, directive: Sync, link: Link, own: Callable[[], Digest]) -> None:
        """Joiner: the state is here, and stands still until :meth:`verdict` has returned."""
        self.drop()
        self._own = _Comparison(directive, link, lambda: stream.has_same(link, own))

    def give(self, directive: Sync, link: Link, own: Callable[[], Digest]) -> None:
        """Source: this state is compared with; no step is committed before that is done."""
        found = _Comparison(directive, link, lambda: stream.confirm(link, own))
        self._others = (*(c for c in self._others if not c.over.is_set()), found)

    @property
    def running(self) -> bool:
        """Whether a digest of this state may still be wanted."""
        return any(not c.over.is_set() for c in self._all)

    @property
    def pending(self) -> bool:
        """Whether this worker holds a state on trust, and is not known to be right."""
        own = self._own
        return own is not None and not own.proved

    def verdict(self) -> str:
        """Wait until it is known whether this worker has the state of its rank: why it must not go
        on with it, or nothing."""
        return self.later()()

    def later(self) -> Verdict:
        """The same for who copies the state as it is now: what it finds, at any time and in any
        thread, is the verdict on that, even if this worker has given its rank back meanwhile."""
        own = self._own
        return (lambda: "") if own is None else own.verdict

    def drop(self) -> None:
        """Main thread: this worker holds no rank, or has another state."""
        own, self._own = self._own, None
        if own is not None:
            own.end("the rank was given back")

    def cancel_unless(self, directive: Directive) -> None:
        """Training does not go on as was planned: nothing is waited for any more (any thread)."""
        for comparison in self._all:
            if not comparison.serves(directive):
                comparison.end("something else is asked for")

    def close(self) -> None:
        """The process ends: no thread may be inside torch then."""
        for comparison in self._all:
            comparison.end("the process ends")
            comparison.join(ENDING_S)

    @property
    def _all(self) -> tuple[_Comparison, ...]:
        own = self._own
        return self._others if own is None else (*self._others, own)


class _Comparison:
    """Comes to one end, whichever is first: a verdict, or that nobody waits for it any more."""

    def __init__(self, directive: Sync, link: Link, equal: Callable[[], bool]) -> None:
        self.directive = directive
        self.over = threading.Event()
        self._link, self._equal = link, equal
        self._refusal = ""
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tmd-proving", daemon=True)
        link.patience(PATIENCE_S)
        try:
            self._thread.start()
        except RuntimeError:
            # No thread to be had: all wait, as they would for a copy.
            self._run()

    def serves(self, directive: Directive) -> bool:
        """Whether this is what all go on from, by ``directive``."""
        if isinstance(directive, Resume | Train):
            return directive.membership == self.directive.membership
        return directive == self.directive

    @property
    def proved(self) -> bool:
        return self.over.is_set() and not self._refusal

    def verdict(self) -> str:
        """Wait for the end: why the states are not known to be equal, or nothing."""
        self.over.wait()
        return self._refusal

    def end(self, why: str) -> None:
        """There is no more need for it, or it has failed; at once, whatever its thread is doing."""
        self._settle(f"source and joiner were not compared: {why}")
        self._link.close()

    def join(self, seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _settle(self, refusal: str) -> None:
        with self._ending:
            if not self.over.is_set():
                self._refusal = refusal
                self.over.set()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            equal = self._equal()
        except BaseException as error:
            if not self.over.is_set():
                log.warning("rank %d, with %s: %s", self.directive.rank, self._link.peer, error)
            self.end(in_words(error))
            return
        if not equal:
            why = "source and joiner have different states: one of them is corrupt"
            log.warning("rank %d, with %s: %s", self.directive.rank, self._link.peer, why)
            self._settle(why)
        else:
            log.info("same state as %s, %.3f s", self._link.peer, time.monotonic() - began)
            self._settle("")
        self._link.close()

"""Verifies a joiner's state in the background, while the joiner computes its first step.

A joiner that shadowed the lost rank, or a replica of it, should already hold the state. It computes
the first step of the new epoch on trust, but does not vote or copy its state to others until its
digest equals the source's (invariant I6). All ranks compute meanwhile, and only the vote waits for
the digests, so that no step of a wrong state is ever committed. If verification fails the step
breaks, and the joiner becomes a standby again.
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
"""Longest wait for the other side's digest."""
ENDING_S = 2.0

StateVerdict = Callable[[], str]
"""Waits for a verification; returns why it failed, or an empty string."""

log = logging.getLogger("tmd.trainer")


class StateVerification:
    """The side of the joiner, and that of the source. Owns a thread and a link for each comparison
    that the main thread begins."""

    def __init__(self) -> None:
        self._own: _Comparison | None = None
        """Comparison of the state that this worker holds on trust, until it gives the rank back."""
        self._others: tuple[_Comparison, ...] = ()
        """Comparisons with joiners that should hold this worker's state."""

    def verify_own(self, directive: Sync, link: Link, own: Callable[[], Digest]) -> None:
        """Joiner: verify the local state, which must not change until :meth:`verdict` returns."""
        self.drop()
        self._own = _Comparison(directive, link, lambda: stream.has_same(link, own))

    def verify_joiner(self, directive: Sync, link: Link, own: Callable[[], Digest]) -> None:
        """Source: verify a joiner's state by this one; no step is committed before the end."""
        found = _Comparison(directive, link, lambda: stream.confirm(link, own))
        self._others = (*(c for c in self._others if not c.over.is_set()), found)

    @property
    def running(self) -> bool:
        """Whether a comparison may still need a digest of this state."""
        return any(not c.over.is_set() for c in self._all)

    @property
    def pending(self) -> bool:
        """Whether this worker holds a state on trust that is not yet verified."""
        own = self._own
        return own is not None and not own.proved

    def verdict(self) -> str:
        """Wait for the verification of this worker's state; returns why it failed, or an empty
        string."""
        return self.later()()

    def later(self) -> StateVerdict:
        """A function that waits for the verification of the current state. A copy of this state
        may call it later in any thread, even after this worker has given its rank back."""
        own = self._own
        return (lambda: "") if own is None else own.verdict

    def drop(self) -> None:
        """Main thread: the rank was given back, or the state was replaced."""
        own, self._own = self._own, None
        if own is not None:
            own.end("the rank was given back")

    def cancel_unless(self, directive: Directive) -> None:
        """Stop comparisons that do not serve ``directive`` (any thread)."""
        for comparison in self._all:
            if not comparison.serves(directive):
                comparison.end("another directive arrived")

    def close(self) -> None:
        """Stop all threads, since none may be inside torch when the process ends."""
        for comparison in self._all:
            comparison.end("the process ends")
            comparison.join(ENDING_S)

    @property
    def _all(self) -> tuple[_Comparison, ...]:
        own = self._own
        return self._others if own is None else (*self._others, own)


class _Comparison:
    """Ends once: with a verdict, or because it was cancelled."""

    def __init__(self, directive: Sync, link: Link, equal: Callable[[], bool]) -> None:
        self.directive = directive
        self.over = threading.Event()
        self._link, self._equal = link, equal
        self._refusal = ""
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tmd-verification", daemon=True)
        link.patience(PATIENCE_S)
        try:
            self._thread.start()
        except RuntimeError:
            # No thread can be started: all ranks wait, as they would for a copy.
            self._run()

    def serves(self, directive: Directive) -> bool:
        """Whether all ranks continue from this comparison's state under ``directive``."""
        if isinstance(directive, Resume | Train):
            return directive.membership == self.directive.membership
        return directive == self.directive

    @property
    def proved(self) -> bool:
        return self.over.is_set() and not self._refusal

    def verdict(self) -> str:
        """Wait for the end; returns why the states may differ, or an empty string."""
        self.over.wait()
        return self._refusal

    def end(self, why: str) -> None:
        """Cancel or fail at once, whatever the thread is doing."""
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

"""Comparing two states beside the step that begins with them.

A joiner that has lived the life of the lost rank, or of a replica, has the state already, or so it
believes. It takes part in the first step of the new epoch on trust, with no vote in it and no copy
of its state for anybody, until its digest has equalled the source's (I6): nobody waits for digests
of a large state, and nothing that is wrong is ever committed. If it cannot be proved the step
breaks, and the joiner is a standby like any other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tmd.core.duties import Duty, Resume, Sync, Train
from tmd.fabric import Link
from tmd.trainer import transfer
from tmd.trainer.transfer import Digest

ENDING_S = 2.0

log = logging.getLogger("tmd.trainer")


class Proving:
    """Both sides. Owns a thread and a link for each comparison, which the main thread begins."""

    def __init__(self) -> None:
        self._own: _Comparison | None = None
        """Of the state that this worker has taken on trust, until it is given back."""
        self._others: tuple[_Comparison, ...] = ()
        """With joiners that have this worker's state."""

    def take(self, duty: Sync, link: Link, own: Callable[[], Digest]) -> None:
        """Joiner: the state is here; it stands still until :meth:`verdict` is asked."""
        self.drop()
        self._own = _Comparison(duty, link, lambda: transfer.has_same(link, own))

    def give(self, duty: Sync, link: Link, own: Callable[[], Digest]) -> None:
        """Source: so it is with this one, at least until the joiner votes."""
        found = _Comparison(duty, link, lambda: transfer.confirm(link, own))
        self._others = (*(c for c in self._others if not c.over.is_set()), found)

    @property
    def pending(self) -> bool:
        """Whether this worker holds a state on trust, and is not known to be right."""
        own = self._own
        return own is not None and (not own.over.is_set() or bool(own.refusal))

    def verdict(self) -> str:
        """Wait until it is known whether this worker has the state of its rank: why it must not go
        on with it, or nothing."""
        return self.later()()

    def later(self) -> Callable[[], str]:
        """The same for who copies the state as it is now: what it finds, at any time and in any
        thread, is the verdict on that, even if this worker has given its rank back meanwhile."""
        own = self._own
        return (lambda: "") if own is None else own.verdict

    def drop(self) -> None:
        """Main thread: this worker holds no rank, or has another state."""
        own, self._own = self._own, None
        if own is not None:
            own.link.close()

    def cancel_unless(self, duty: Duty) -> None:
        """Training does not go on as was planned: nothing is waited for any more (any thread)."""
        for comparison in self._all:
            if not comparison.serves(duty):
                comparison.link.close()

    def close(self) -> None:
        """The process ends: no thread may be inside torch then."""
        for comparison in self._all:
            comparison.link.close()
            comparison.over.wait(ENDING_S)

    @property
    def _all(self) -> tuple[_Comparison, ...]:
        own = self._own
        return self._others if own is None else (*self._others, own)


class _Comparison:
    def __init__(self, duty: Sync, link: Link, equal: Callable[[], bool]) -> None:
        self.duty, self.link = duty, link
        self.over = threading.Event()
        self.refusal = ""
        self._equal = equal
        try:
            threading.Thread(target=self._run, name="tmd-proving", daemon=True).start()
        except RuntimeError:
            # No thread to be had: all wait, as they would for a copy.
            self._run()

    def serves(self, duty: Duty) -> bool:
        """Whether this is what all go on from, by ``duty``."""
        if isinstance(duty, Resume | Train):
            return duty.membership == self.duty.membership
        return duty == self.duty

    def verdict(self) -> str:
        self.over.wait()
        return self.refusal

    def _run(self) -> None:
        began = time.monotonic()
        try:
            if not self._equal():
                self.refusal = "source and joiner have different states: one of them is corrupt"
        except Exception as error:
            self.refusal = f"source and joiner were not compared: {error}"
            log.warning("%s", self.refusal)
        finally:
            log.info("compared with %s: %.3f s", self.link.peer, time.monotonic() - began)
            self.link.close()
            self.over.set()

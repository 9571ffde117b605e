"""Computes the digest that is compared after a loss in the background: it starts at the loss, while
the broken step still runs and is then repeated.

Parameters and optimizer state change only when an optimizer runs, and none runs before the
comparison ends; for parameters that a step changes itself see :mod:`tmd.trainer.state.step_start`.
So no rank waits for the digest, however large the state is. Between the end of a step and the next
boundary a script may change both.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tmd.core.values.errors import StateMismatch
from tmd.fabric import device
from tmd.fabric.device import Queued
from tmd.trainer.state.digests import Digest
from tmd.trainer.state.units import UnitDigest, Units, whole_digest

ENDING_S = 2.0

log = logging.getLogger("tmd.trainer")


class EarlyDigest:
    """Main thread or :class:`Continuation`, except :meth:`begin`. Owns a thread while there is
    work."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._changing = threading.Lock()
        self._step: int | None = None
        """The step at whose start the parameters are; ``None`` while they may change."""
        self._queued: Queued = device.NOTHING
        self._rest: Digest | None = None
        self._work: _Work | None = None
        self._reported: set[str] = set()
        """Why the rest could not be digested, as far as it was logged."""

    def stand(self, step: int) -> None:
        """The parameters are those at the start of ``step`` until :meth:`forget`."""
        if self._step != step:
            self.forget()
            self._queued = device.current().queued(self._units.params)
            self._step = step

    def keep_rest(self) -> None:
        """Take the digest of what a step may change, before the step. Another thread may need it
        while the step is computed."""
        try:
            self._rest = self._units.digest_of_rest()
        except StateMismatch as error:
            # A healthy job goes on. The state would not move to a standby either.
            if str(error) not in self._reported:
                self._reported.add(str(error))
                log.warning("the state of this rank cannot be compared: %s", error)
            self._rest = None

    def begin(self) -> None:
        """Start to compute, unless the state may change (any thread)."""
        with self._changing:
            if self._step is None or self._work is not None:
                return
            try:
                self._work = _Work(self._units, self._step, self._queued)
            except RuntimeError as error:
                log.info("no early digest: %s", error)

    def of(self, step: int) -> Callable[[], Digest]:
        """Returns a function that waits for the digest of the whole state at the start of ``step``,
        where this worker is. Any thread may call it while the parameters do not change.
        """
        self.stand(step)
        self.begin()
        work = self._work
        if work is None:
            with self._units.start.reading():
                whole = whole_digest(self._units, step, self._rest)
            return lambda: whole
        rest = self._units.digest_of_rest() if self._rest is None else self._rest
        return lambda: {**work.result(), **rest}

    def finish(self) -> None:
        """Wait for the digest, if one is being computed: the state may change next."""
        if (work := self._work) is not None:
            work.join()

    def forget(self) -> None:
        """Drop the digest before the state changes; waits for the current piece."""
        if (work := self._dropped()) is not None:
            work.join()

    def close(self) -> None:
        """Wait up to ``ENDING_S`` for the thread, since the process ends."""
        if (work := self._dropped()) is not None:
            work.join(ENDING_S)

    def _dropped(self) -> _Work | None:
        with self._changing:
            work, self._work, self._step, self._rest = self._work, None, None, None
        if work is not None:
            work.cancelled = True
        return work


class _Work:
    """Digest of the units of one step, without those that a broken step may change.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, units: Units, step: int, queued: Queued) -> None:
        self.step = step
        self.cancelled = False
        self._units = units
        self._queued = queued
        self._digest = self._begun()
        self._thread = threading.Thread(target=self._run, name="tmd-early-digest", daemon=True)
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def result(self) -> Digest:
        """Wait for the digest. If the thread failed, the caller tries once more.

        Raises:
            RuntimeError: the state has changed meanwhile.
        """
        self.join()
        digest = self._digest if self._digest.complete else self._begun()
        self._take(digest)
        if not digest.complete:
            raise RuntimeError(f"the state of step {self.step} has been replaced")
        return digest.parts()

    def _run(self) -> None:
        try:
            self._take(self._digest)
        except Exception as error:
            log.info("no early digest: %s", error)

    def _begun(self) -> UnitDigest:
        return UnitDigest(self._units, self.step, rest={})

    def _take(self, digest: UnitDigest) -> None:
        with device.after(self._queued):
            while not (self.cancelled or digest.complete):
                with self._units.start.reading():
                    digest.advance()

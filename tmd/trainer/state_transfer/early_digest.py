"""The digest of a state that is compared after a loss, taken beside computing: from the loss on,
while the broken step runs to its end for nothing, and while it is run again.

Parameters and what the optimizers keep for them change only when an optimizer runs, and none does
before the comparison is over; so nobody has to wait for this, however large the state is. Between
the end of a step and the next boundary a script may do anything to them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tmd.trainer.state.digests import Digest
from tmd.trainer.state.units import UnitDigest, Units, whole_digest

ENDING_S = 2.0

log = logging.getLogger("tmd.trainer")


class EarlyDigest:
    """For the main thread, but for :meth:`begin`. Owns a thread while there is work."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._changing = threading.Lock()
        self._step: int | None = None
        """At whose start the parameters stand; ``None`` while they may change."""
        self._work: _Work | None = None

    def stand(self, step: int) -> None:
        """The parameters are those of the start of ``step``, and stay so until :meth:`forget`."""
        if self._step != step:
            self.forget()
            self._step = step

    def begin(self) -> None:
        """The state will be compared; nothing is done where it may change (any thread)."""
        with self._changing:
            if self._step is None or self._work is not None:
                return
            try:
                self._work = _Work(self._units, self._step)
            except RuntimeError as error:
                log.info("no digest ahead of time: %s", error)

    def of(self, step: int) -> Callable[[], Digest]:
        """The digest of all at the start of ``step``, at which this worker stands, between two
        steps. To be called by any thread, as long as the parameters stand still; then it waits.
        """
        self.stand(step)
        self.begin()
        work = self._work
        if work is None:
            whole = whole_digest(self._units, step)
            return lambda: whole
        rest = self._units.digest_of_rest()
        return lambda: {**work.result(), **rest}

    def forget(self) -> None:
        """The state changes from here on, or is another one; waits for the piece in hand."""
        if (work := self._dropped()) is not None:
            work.join()

    def close(self) -> None:
        """The process ends: wait a while for the thread."""
        if (work := self._dropped()) is not None:
            work.join(ENDING_S)

    def _dropped(self) -> _Work | None:
        with self._changing:
            work, self._work, self._step = self._work, None, None
        if work is not None:
            work.cancelled = True
        return work


class _Work:
    """The units of one step; nothing of what may change in a broken step.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, units: Units, step: int) -> None:
        self.step = step
        self.cancelled = False
        self._units = units
        self._digest = self._begun()
        self._thread = threading.Thread(target=self._run, name="tmd-early-digest", daemon=True)
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def result(self) -> Digest:
        """What was found, when it is; if that failed it is tried once more, by the caller.

        Raises:
            RuntimeError: the state has changed meanwhile.
        """
        self.join()
        digest = self._digest if self._digest.complete else self._begun()
        self._take(digest)
        if not digest.complete:
            raise RuntimeError(f"the state of step {self.step} is not here any more")
        return digest.parts()

    def _run(self) -> None:
        try:
            self._take(self._digest)
        except Exception as error:
            log.info("no digest ahead of time: %s", error)

    def _begun(self) -> UnitDigest:
        return UnitDigest(self._units, self.step, rest={})

    def _take(self, digest: UnitDigest) -> None:
        while not (self.cancelled or digest.complete):
            digest.advance()

"""The digest of a state that will be compared after a loss, taken while the broken step is computed
to its end for nothing.

Parameters and what the optimizers keep for them do not change from there until it is known what
comes next, so that nobody has to wait for this once all have halted, however large the state is.
"""

from __future__ import annotations

import logging
import threading

from tmd.trainer.transfer import Digest
from tmd.trainer.units import UnitDigest, Units, whole_digest

log = logging.getLogger("tmd.trainer")


class EarlyDigest:
    """Of at most one step at a time. Owns a thread while there is work."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._changing = threading.Lock()
        self._work: _Work | None = None

    def begin(self, step: int) -> None:
        """The state at the start of ``step`` stands still and will be compared (any thread).

        It may be wrong of this worker to think so, if the step was committed a moment ago: then
        the job goes on from a later one, and what is found here is asked for by nobody.
        """
        with self._changing:
            if self._work is not None and self._work.step == step:
                return
            if self._work is not None:
                self._work.cancel()
            self._work = _Work(self._units, step)

    def of(self, step: int) -> Digest:
        """The digest of all at the start of ``step``, at which this worker stands; for the main
        thread, between steps."""
        work = self._work
        if work is not None and work.step == step and (found := work.result()) is not None:
            return {**found, **self._units.digest_of_rest()}
        self.forget()
        return whole_digest(self._units, step)

    def forget(self) -> None:
        """The state changes from here on, or is another one; waits for the piece in hand."""
        with self._changing:
            work, self._work = self._work, None
        if work is not None:
            work.cancel()
            work.result()


class _Work:
    """The units of one step; nothing of what may change in a broken step."""

    def __init__(self, units: Units, step: int) -> None:
        self.step = step
        self._digest = UnitDigest(units, step, rest={})
        self._cancelled = self._failed = False
        self._thread = threading.Thread(target=self._run, name="tmd-early-digest", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        self._cancelled = True

    def result(self) -> Digest | None:
        """What was found, when it is; ``None`` if it came to nothing."""
        self._thread.join()
        return self._digest.parts() if self._digest.complete and not self._failed else None

    def _run(self) -> None:
        try:
            while not (self._cancelled or self._digest.complete):
                self._digest.advance()
        except Exception as error:
            # An optimizer may be at work after all, if the step was committed.
            self._failed = True
            log.info("no digest ahead of time: %s", error)

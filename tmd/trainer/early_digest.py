"""The digest of a state that will be compared after a loss, taken while the broken step is computed
to its end for nothing.

Parameters and what the optimizers keep for them change only when an optimizer runs, and after a
loss none does until it is known what comes next; so nobody has to wait for this once all have
halted, however large the state is. Between two steps a script may do anything to them.
"""

from __future__ import annotations

import logging
import threading

from tmd.trainer.transfer import Digest
from tmd.trainer.units import UnitDigest, Units, whole_digest

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

    def of(self, step: int) -> Digest:
        """The digest of all at the start of ``step``, at which this worker stands, between two
        steps."""
        work = self._work
        if work is not None and work.step == step and (found := work.result()) is not None:
            return {**found, **self._units.digest_of_rest()}
        return whole_digest(self._units, step)

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
        self._digest = UnitDigest(units, step, rest={})
        self._thread = threading.Thread(target=self._run, name="tmd-early-digest", daemon=True)
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def result(self) -> Digest | None:
        """What was found, when it is; ``None`` if it came to nothing."""
        self.join()
        return self._digest.parts() if self._digest.complete else None

    def _run(self) -> None:
        try:
            while not (self.cancelled or self._digest.complete):
                self._digest.advance()
        except Exception as error:
            log.info("no digest ahead of time: %s", error)

"""Gives up a build of groups beside training if no step is committed meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tmd.core.values.model import WorkerStatus
from tmd.core.worker.build_stall import is_stalled

LOOK_S = 0.5

OnBuilt = Callable[[str], None]
"""Called with the reason why the groups cannot be built, or with an empty one once they are."""

log = logging.getLogger("tmd.trainer")


class BuildWatch:
    """Owns a thread for each build that does not end at once.

    Args:
        status: returns this worker's status, which shows its step.
        on_stall: called with the reason why a build is given up.
    """

    def __init__(
        self,
        status: Callable[[], WorkerStatus],
        on_stall: Callable[[str], None],
        *,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status, self._on_stall = status, on_stall
        self._look_s, self._clock = look_s, clock
        self._build: _Build | None = None
        """The latest one."""

    def build(self, epoch: int, start: Callable[[OnBuilt], None], on_built: OnBuilt) -> None:
        """Build for ``epoch``: call ``start`` with a function to be called at the end of the build.
        ``on_built`` is called once: then, or when the build is given up."""
        build = self._build = _Build(epoch, on_built)
        start(build.end)
        if not build.over.is_set():
            thread = threading.Thread(
                target=self._watch, args=(build,), name="tmd-build-watch", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                log.info("a build is not watched: %s", error)

    def drop(self, epoch: int) -> None:
        """The build for ``epoch`` was dropped: nobody waits for its end."""
        if self._build is not None and self._build.epoch == epoch:
            self._build.drop()

    def _watch(self, build: _Build) -> None:
        step, since = self._status().step, self._clock()
        while not build.over.wait(self._look_s):
            status, now = self._status(), self._clock()
            if status.step != step:
                step, since = status.step, now
            elif is_stalled(now - since, status.step_seconds):
                why = f"no step was committed for {now - since:.0f} s during a build of groups"
                # Reported first: the leader may try again at once.
                build.end(why, before=self._on_stall)


class _Build:
    """One build. It ends once, or is dropped."""

    def __init__(self, epoch: int, on_built: OnBuilt) -> None:
        self.epoch = epoch
        self.over = threading.Event()
        self._on_built, self._ending = on_built, threading.Lock()

    def end(self, why: str, before: Callable[[str], None] = lambda _: None) -> None:
        """It is done, or was given up because of ``why``. ``before`` is called before this is
        reported, if it is."""
        if self._ending.acquire(blocking=False):
            self.over.set()
            before(why)
            self._on_built(why)

    def drop(self) -> None:
        """Its end is reported no more."""
        self._ending.acquire(blocking=False)
        self.over.set()

"""All groups of this worker in their current generation, and the next one while it is built.

Order matters here. Inner groups are built one after another, in the order in which the script made
the groups, on all members: several at once may wait for each other. A loss first marks all
generations as aborted, so that no later call waits, and then aborts all inner groups at once, each
in a thread of its own: aborting one may wait for another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from tmd.core.values.errors import IllegalTransition
from tmd.core.values.model import Membership
from tmd.core.values.reasons import in_words
from tmd.fabric.generations.generation import Generation, members_of
from tmd.fabric.generations.inner import Build
from tmd.fabric.generations.states import GenerationEvent, GenerationState
from tmd.fabric.grouping import GroupView

HUNG_LIMIT = 2
"""Builds that may hang in a worker before it refuses to build another."""

log = logging.getLogger("tmd.trainer")


class _Next:
    """The generations of a coming epoch. Owns the thread that builds them."""

    def __init__(
        self, build: Build, membership: Membership, found: list[tuple[GroupView, Generation]]
    ) -> None:
        self.epoch = membership.epoch
        self.by_name = {view.name: generation for view, generation in found}
        self._build, self._membership, self._found = build, membership, found
        self.over = threading.Event()
        """Set once all are built, one has failed, or the rest was dropped."""
        self.thread = threading.Thread(target=self._run, name="tmd-generations", daemon=True)

    def _run(self) -> None:
        try:
            for view, generation in self._found:
                if generation.state is not GenerationState.BUILDING:
                    continue
                if self.over.is_set():
                    generation.failed("it was not begun")
                    continue
                self._build_one(view, generation)
        finally:
            self.over.set()

    def _build_one(self, view: GroupView, generation: Generation) -> None:
        try:
            generation.built(self._build(view, self._membership))
        except Exception as error:
            log.warning("group %s of epoch %d: %s", view.name, self.epoch, error)
            generation.failed(in_words(error))
            self.over.set()

    @property
    def refusal(self) -> str:
        """Why it can never be switched to; empty if it can, or may later."""
        return next((g.failure for g in self.by_name.values() if g.failure), "")

    @property
    def ready(self) -> bool:
        usable = (GenerationState.READY, GenerationState.LIVE)
        return self.over.is_set() and all(g.state in usable for g in self.by_name.values())


class Generations:
    """``build`` makes the inner groups of this worker. The main thread switches; :meth:`abort` may
    be called by any thread."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._live: dict[str, Generation] = {}
        self._next: _Next | None = None
        self._over: list[Generation] = []
        """Generations that are no longer used, and not freed yet."""
        self._left: list[_Next] = []
        """Dropped ones whose thread may hang in a build."""
        self._changing = threading.RLock()

    def live(self, name: str) -> Generation | None:
        """The generation that the collectives of a group use, perhaps aborted; ``None`` before the
        first."""
        return self._live.get(name)

    @property
    def hung(self) -> int:
        """Builds that were given up and have not ended."""
        self._left = [each for each in self._left if each.thread.is_alive()]
        return len(self._left)

    def prepare(self, views: Sequence[GroupView], membership: Membership) -> None:
        """Begin to build what ``membership`` needs, in the background.

        A group whose members stay keeps its generation. An earlier preparation is dropped.

        Raises:
            RuntimeError: too many builds hang in this worker, or no thread can be started.
        """
        with self._changing:
            self.discard()
            if self.hung >= HUNG_LIMIT:
                raise RuntimeError(
                    f"{self.hung} builds of communicators hang in this worker, so it takes part in "
                    "no further move: restart it"
                )
            found = [(view, self._kept(view, membership)) for view in views]
            coming = _Next(self._build, membership, found)
            coming.thread.start()
            self._next = coming

    def _kept(self, view: GroupView, membership: Membership) -> Generation:
        old = self._live.get(view.name)
        alike = old is not None and old.members == members_of(view, membership)
        if old is not None and alike and old.state is GenerationState.LIVE:
            return old
        return Generation(view, membership)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the preparation; returns whether it is ready to be switched to."""
        coming = self._next
        return coming is not None and coming.over.wait(seconds) and coming.ready

    @property
    def refusal(self) -> str:
        """Why the prepared epoch can never be switched to; empty if it can, or may later."""
        return "" if self._next is None else self._next.refusal

    def switch(self, epoch: int) -> None:
        """Use the generations of ``epoch`` from now on. What they replace is freed by :meth:`reap`.

        Raises:
            IllegalTransition: they are not ready; nothing has changed.
        """
        with self._changing:
            coming = self._next
            if coming is None or coming.epoch != epoch or not coming.ready:
                raise IllegalTransition(f"the generations of epoch {epoch} are not ready")
            before, self._live, self._next = self._live, coming.by_name, None
            for generation in self._live.values():
                if generation.state is GenerationState.READY:
                    generation.happens(GenerationEvent.SWITCHED_TO)
            for old in before.values():
                if old is self._live.get(old.name):
                    continue
                if old.state is GenerationState.LIVE:
                    old.happens(GenerationEvent.REPLACED)
                    self._over.append(old)

    def discard(self) -> None:
        """Drop what is prepared. A build that runs is given up."""
        with self._changing:
            coming, self._next = self._next, None
            if coming is None:
                return
            coming.over.set()
            mine = [g for g in coming.by_name.values() if g is not self._live.get(g.name)]
            for generation in mine:
                generation.drop()
            self._over += mine
            self._left.append(coming)

    def abort(self, within_s: float) -> tuple[str, ...]:
        """A member is lost: end what runs in all groups, and drop what is prepared.

        Returns the groups whose abort has not ended within ``within_s`` seconds. Their collectives
        may never end, so that only the end of this process frees its main thread.
        """
        with self._changing:
            lost = [g for g in self._live.values() if g.state is GenerationState.LIVE]
            for generation in lost:
                generation.happens(GenerationEvent.LOST)
            self._over += lost
            self.discard()
        return _at_once({g.name: g.inner.abort for g in lost}, within_s)

    def reap(self) -> None:
        """Free what is no longer used on any member, as after the first commit of a new epoch."""
        with self._changing:
            over, self._over = self._over, []
        for generation in over:
            generation.close()
            if generation.state is not GenerationState.FREED:
                self._over.append(generation)  # its build has not ended

    def close(self, within_s: float) -> tuple[str, ...]:
        """End all; returns the groups that hang."""
        hung = self.abort(within_s)
        self.reap()
        return hung


def _at_once(calls: dict[str, Callable[[], None]], within_s: float) -> tuple[str, ...]:
    """Run all, each in a thread; returns the names of those that have not ended in time."""
    threads = {
        name: threading.Thread(target=_harmless, args=(name, call), name=f"tmd-abort-{name}")
        for name, call in calls.items()
    }
    for thread in threads.values():
        thread.daemon = True
        thread.start()
    deadline = time.monotonic() + within_s
    for thread in threads.values():
        thread.join(max(deadline - time.monotonic(), 0))
    return tuple(_alive(threads.items()))


def _alive(threads: Iterable[tuple[str, threading.Thread]]) -> Iterable[str]:
    return (name for name, thread in threads if thread.is_alive())


def _harmless(name: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:
        log.warning("the abort of group %s: %s", name, error)

"""All groups of this worker in their current generation, and the next one while it is built.

Order matters here. Inner groups are built one after another, in the order in which the script made
the groups, on all members: several at once may wait for each other. A loss first marks all
generations as aborted, so that no later call waits, and then aborts all inner groups at once, each
in a thread of its own: aborting one may wait for another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from tmd.core.values.errors import IllegalTransition
from tmd.core.values.model import Membership
from tmd.fabric.generations.generation import Generation, members_of
from tmd.fabric.generations.inner import Build
from tmd.fabric.generations.states import GenerationEvent, GenerationState
from tmd.fabric.grouping import GroupView

BUILD_S = 120.0
"""A build that was given up counts as hung after this time. The next one waits for it so long."""
HUNG_LIMIT = 2
"""Hung builds after which a worker takes part in no further planned move."""
IN_USE = (GenerationState.LIVE, GenerationState.RETIRED)


class _Preparation:
    """The generations of a coming epoch. Owns the thread that builds them."""

    def __init__(
        self,
        epoch: int,
        generations: Sequence[Generation],
        build: Build,
        former: _Preparation | None,
        patience_s: float,
    ) -> None:
        self.epoch = epoch
        self.by_name = {generation.name: generation for generation in generations}
        self.over = threading.Event()
        """Set once all are built, one has failed, or this preparation was dropped."""
        self.hung = False
        """Whether its thread was waited for in vain."""
        self._build, self._former, self._patience_s = build, former, patience_s
        self._thread = threading.Thread(target=self._run, name="tmd-generations", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._former is not None:
            self._former.await_end(self._patience_s)
            self._former = None
        for generation in self.by_name.values():
            if generation.state is not GenerationState.BUILDING:
                continue
            if self.over.is_set():
                generation.fail("an earlier group failed, or the preparation was dropped")
                continue
            generation.build(self._build)
            if generation.failure:
                self.over.set()
        self.over.set()

    def await_end(self, seconds: float) -> None:
        """Wait for its thread, which may be inside a build."""
        self._thread.join(seconds)
        self.hung = self._thread.is_alive()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def failure(self) -> str:
        """Why it can never be switched to; empty if it can, or may later."""
        return next((g.failure for g in self.by_name.values() if g.failure), "")

    @property
    def ready(self) -> bool:
        usable = (GenerationState.READY, GenerationState.LIVE)
        return self.over.is_set() and all(g.state in usable for g in self.by_name.values())


class Generations:
    """``build`` makes the inner groups of this worker. The main thread switches; any thread may
    call :meth:`abort`."""

    def __init__(self, build: Build, *, build_s: float = BUILD_S) -> None:
        self._build, self._build_s = build, build_s
        self._live: dict[str, Generation] = {}
        self._next: _Preparation | None = None
        self._abandoned: list[_Preparation] = []
        """Dropped preparations whose thread has not ended."""
        self._to_free: list[Generation] = []
        self._aborts: dict[Generation, threading.Thread] = {}
        """Aborts that have not ended."""
        self._refusal = "nothing is prepared"
        self._changing = threading.RLock()

    def live(self, name: str) -> Generation | None:
        """The generation that the collectives of a group use, perhaps aborted; ``None`` before the
        first."""
        return self._live.get(name)

    @property
    def moves(self) -> bool:
        """Whether it may take part in planned moves: fewer than ``HUNG_LIMIT`` builds hang."""
        with self._changing:
            self._abandoned = [each for each in self._abandoned if each.running]
            return sum(each.hung for each in self._abandoned) < HUNG_LIMIT

    def prepare(self, views: Sequence[GroupView], membership: Membership) -> None:
        """Begin to build what ``membership`` needs, in the background.

        A group whose members stay keeps its generation. An earlier preparation is dropped, and its
        build is waited for before the next one begins. A worker that leaves has no ``views``.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self._changing:
            self._drop("another epoch is prepared")
            found = [self._kept(view, membership) for view in views]
            former = self._abandoned[-1] if self._abandoned else None
            self._next = _Preparation(membership.epoch, found, self._build, former, self._build_s)
            self._refusal = ""

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
        """Why no preparation can be switched to; empty if one can, or may later."""
        coming = self._next
        return self._refusal if coming is None else coming.failure

    def switch(self, epoch: int) -> None:
        """Use the generations of ``epoch`` from now on, in the main thread.

        What this worker has called in the generations before is done: its device was waited for.
        They are freed by :meth:`reap`, since other members may still use them.

        Raises:
            IllegalTransition: those of ``epoch`` are not ready; nothing has changed.
        """
        with self._changing:
            coming = self._next
            if coming is None or coming.epoch != epoch or not coming.ready:
                raise IllegalTransition(f"the generations of epoch {epoch} are not ready")
            before, self._live, self._next = self._live, coming.by_name, None
            self._refusal = "nothing is prepared"
            for generation in self._live.values():
                if generation.state is GenerationState.READY:
                    generation.happens(GenerationEvent.SWITCHED_TO)
            for old in before.values():
                if old.state is GenerationState.LIVE and old is not self._live.get(old.name):
                    old.happens(GenerationEvent.REPLACED)
                    self._to_free.append(old)

    def discard(self) -> None:
        """Drop what is prepared. A build that runs is left to itself."""
        with self._changing:
            self._drop("the preparation was dropped")

    def _drop(self, why: str) -> None:
        coming, self._next = self._next, None
        if coming is None:
            return
        self._refusal = why
        coming.over.set()
        for generation in coming.by_name.values():
            if generation is not self._live.get(generation.name):
                generation.drop()
                self._to_free.append(generation)
        self._abandoned.append(coming)

    def abort(self, within_s: float) -> tuple[str, ...]:
        """A member is lost: end what runs in all groups, and drop what is prepared.

        Returns the groups whose abort, of this call or an earlier one, has not ended within
        ``within_s`` seconds. Their collectives may never end, so that only the end of this process
        frees its main thread.
        """
        with self._changing:
            self._drop("a member is lost")
            used = {*self._live.values(), *self._to_free}
            for generation in (each for each in used if each.state in IN_USE):
                generation.happens(GenerationEvent.LOST)
                self._aborts[generation] = threading.Thread(
                    target=generation.abort, name=f"tmd-abort-{generation.name}", daemon=True
                )
                if generation not in self._to_free:
                    self._to_free.append(generation)
            for thread in self._aborts.values():
                if thread.ident is None:
                    thread.start()
            aborts = dict(self._aborts)
        deadline = time.monotonic() + within_s
        for thread in aborts.values():
            thread.join(max(deadline - time.monotonic(), 0))
        return tuple(each.name for each, thread in aborts.items() if thread.is_alive())

    def reap(self) -> None:
        """Free what no member uses any longer, as after the first commit of a new epoch.

        What is still being built or aborted is freed by a later call.
        """
        with self._changing:
            self._aborts = {g: thread for g, thread in self._aborts.items() if thread.is_alive()}
            for generation in self._to_free:
                if generation not in self._aborts:
                    generation.close()
            self._to_free = [
                each for each in self._to_free if each.state is not GenerationState.FREED
            ]

    def close(self, within_s: float) -> tuple[str, ...]:
        """End all; returns the groups that hang, which keep what they have."""
        hung = self.abort(within_s)
        self.reap()
        return hung

"""The generations of a coming epoch, while they are built."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tmd.core.values.model import Membership
from tmd.core.values.reasons import in_words
from tmd.fabric.generations.generation import Generation, identity_of
from tmd.fabric.generations.inner import InnerKind
from tmd.fabric.generations.states import GenerationState


class Preparation:
    """Owns the thread that builds ``generations``, one after another.

    Args:
        membership: the one that they are built for.
        kind: builds the inner groups.
        former: a dropped preparation whose build must end first.
        patience_s: how long to wait for it.
        done: called in the thread with the reason why not all could be built, or with an empty
            one; not called if the preparation was given up.
    """

    def __init__(
        self,
        membership: Membership,
        generations: Sequence[Generation],
        kind: InnerKind | None,
        former: Preparation | None,
        patience_s: float,
        done: Callable[[str], None],
    ) -> None:
        self.membership = membership
        self.by_name = {generation.name: generation for generation in generations}
        self.over = threading.Event()
        """Set once all are built, one has failed, or this preparation was dropped."""
        self.hung = False
        """Whether its thread was waited for in vain."""
        self._kind, self._former, self._patience_s = kind, former, patience_s
        self._done = done
        self._given_up = ""
        self._thread = threading.Thread(target=self._run, name="tmd-generations", daemon=True)

    def is_for(self, membership: Membership) -> bool:
        return identity_of(self.membership) == identity_of(membership)

    def start(self) -> None:
        """Begin to build. If the system refuses a thread, none can be built."""
        if not self.by_name:
            return self._run()
        try:
            self._thread.start()
        except RuntimeError as error:
            for generation in self.by_name.values():
                generation.fail(in_words(error))
            self.over.set()
            self._done(self.failure)

    def give_up(self, why: str) -> None:
        """Nothing of it will be used. A build that runs is left to itself."""
        self._given_up = why
        self.over.set()
        for generation in self.by_name.values():
            generation.drop()

    def _run(self) -> None:
        if self._former is not None:
            self._former.await_end(self._patience_s)
            self._former = None
        for generation in self.by_name.values():
            if self.over.is_set():
                generation.fail("an earlier group failed, or the preparation was dropped")
            elif self._kind is not None:
                generation.build(self._kind)
            if generation.failure:
                self.over.set()
        self.over.set()
        if not self._given_up:
            self._done(self.failure)

    def await_end(self, seconds: float) -> None:
        """Wait for its thread, which may be inside a build."""
        self._thread.join(seconds)
        self.hung = self._thread.is_alive()

    @property
    def running(self) -> bool:
        """Whether its thread may be inside a build; there is none if nothing has to be built."""
        return self._thread.is_alive()

    @property
    def failure(self) -> str:
        """Why it can never be switched to; empty if it can, or may later."""
        return next((g.failure for g in self.by_name.values() if g.failure), "")

    @property
    def ready(self) -> bool:
        """Whether all that are needed are built, and none was used or given up."""
        states = {each.state for each in self.by_name.values() if not each.unneeded}
        return self.over.is_set() and not self._given_up and states <= {GenerationState.READY}

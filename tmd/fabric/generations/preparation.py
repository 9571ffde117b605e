"""The generations of a coming epoch, while they are built."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tmd.core.values.model import Membership
from tmd.core.values.reasons import in_words
from tmd.fabric.generations.generation import Generation, identity_of
from tmd.fabric.generations.inner import BuildTime, InnerKind
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

    What is built at a switch is not built before :meth:`begin`, and ``done`` is called once the
    build of ``former`` has ended.
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
        self.at_switch = any(each.when is BuildTime.AT_SWITCH for each in generations)
        self.by_name = {generation.name: generation for generation in generations}
        self.destroyed: set[str] = set()
        """Names of groups that the script has destroyed meanwhile."""
        self.settled = threading.Event()
        """Set once it can be switched to, or never will be."""
        self.hung = False
        """Whether its thread was waited for in vain."""
        self._kind, self._former, self._patience_s = kind, former, patience_s
        self._done = done
        self._given_up = ""
        self._switched = threading.Event()
        """Set at the switch to it, or once there will be none."""
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
            self._settle()

    def begin(self) -> None:
        """All members switch to it: build what is built at a switch."""
        self._switched.set()

    def give_up(self, why: str) -> None:
        """Nothing of it will be used. A build that runs is left to itself."""
        self._given_up = why
        self.settled.set()
        self._switched.set()
        for generation in self.by_name.values():
            generation.drop()

    def _run(self) -> None:
        if self._former is not None:
            self._former.await_end(self._patience_s)
            self._former = None
        if self.at_switch:
            self._settle()
            self._switched.wait()
            self._build()
        else:
            self._build()
            self._settle()

    def _build(self) -> None:
        for generation in self.by_name.values():
            if self._given_up or self.failure:
                generation.fail("an earlier group failed, or the preparation was dropped")
            elif self._kind is not None:
                generation.build(self._kind)
            generation.replaces = None

    def _settle(self) -> None:
        self.settled.set()
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
        """Whether it can be switched to: all that are needed are built, unless that is to be done
        at the switch, and none was used or given up."""
        states = {each.state for each in self.by_name.values() if not each.unneeded}
        wanted = GenerationState.BUILDING if self.at_switch else GenerationState.READY
        return self.settled.is_set() and not self._given_up and states <= {wanted}

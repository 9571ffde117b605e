"""One generation of one group."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from tmd.core.values.model import Membership
from tmd.core.values.reasons import in_words
from tmd.fabric.generations.inner import (
    BuildTime,
    CannotBuildBeside,
    GroupRequest,
    Inner,
    InnerKind,
)
from tmd.fabric.generations.states import GenerationEvent, GenerationState, transition
from tmd.fabric.grouping import GroupView

Members = tuple[str, ...]
"""Workers by rank in the group."""

T = TypeVar("T")

log = logging.getLogger("tmd.trainer")


def members_of(view: GroupView, membership: Membership) -> Members:
    return tuple(membership.members[rank].worker for rank in view.ranks)


def identity_of(membership: Membership) -> tuple[int, Members]:
    """What distinguishes two plans: one epoch may be planned twice, with another joiner."""
    return membership.epoch, tuple(member.worker for member in membership.members)


class Generation:
    """A group of fixed ``members`` from the epoch of ``membership`` on. Thread-safe."""

    def __init__(
        self,
        view: GroupView,
        membership: Membership,
        device: torch.device | None = None,
        *,
        round: int = 0,
        when: BuildTime = BuildTime.ALONE,
        wait_s: float | None = None,
    ) -> None:
        """``device``, ``round``, ``when``: see :class:`GroupRequest`. ``wait_s``: longest wait of
        :meth:`use` for the build, once all members have come to it."""
        self.name, self._view = view.name, view
        self.epoch = membership.epoch
        self.members = members_of(view, membership)
        self.state = GenerationState.BUILDING
        self.failure = ""
        """Why it could not be built."""
        self.only_at_switch = False
        """It could not be built beside training."""
        self.settled = threading.Event()
        """Set once it is built, cannot be built, or was dropped."""
        self._here = threading.Event()
        """Set once all members have come to the build, or it is settled."""
        self.unneeded = False
        """No member had used the group when it should be built."""
        self.round, self.when, self._wait_s = round, when, wait_s
        self.replaces: Generation | None = None
        """The one that its members have used until they switched to it."""
        self._request = GroupRequest(
            view,
            membership,
            lambda: self.wanted,
            device,
            round,
            when,
            self._here.set,
            self._make_room,
        )
        self._inner: Inner | None = None
        self._build_over = False
        """Whether no build can bring an inner group any more."""
        self._changing = threading.Lock()

    def has_members_of(self, membership: Membership) -> bool:
        """Whether the group has the same members in ``membership``."""
        return members_of(self._view, membership) == self.members

    @property
    def inner(self) -> Inner:
        """The group, from READY until FREED."""
        assert self._inner is not None
        return self._inner

    @property
    def wanted(self) -> bool:
        """Whether it is being built or used; other members may still build it."""
        return self.state not in OVER

    def build(self, kind: InnerKind) -> None:
        """Build the inner group, for which this thread may wait long. An error is stored."""
        try:
            inner = kind.build(self._request)
        except BaseException as error:
            if self.wanted:
                log.warning("group %s of epoch %d: %s", self.name, self.epoch, error)
            self.only_at_switch = isinstance(error, CannotBuildBeside)
            self.fail(in_words(error))
            return
        with self._changing:
            self._inner, self.unneeded = inner, inner is None
            if inner is None:
                return self._drop()
            if self.state is GenerationState.BUILDING:
                self.state = transition(self.state, GenerationEvent.BUILT)
                self._settle()
                return
        self.close()  # it was dropped meanwhile

    def _make_room(self) -> None:
        replaced, self.replaces = self.replaces, None
        if replaced is not None:
            replaced.release()

    def release(self) -> None:
        """Free it, unless it is being aborted: all members have replaced it."""
        self._close(unless=GenerationState.ABORTED)

    def fail(self, why: str) -> None:
        """It cannot be built."""
        with self._changing:
            self.failure, self._build_over = why, True
        self.drop()

    def _expire(self) -> None:
        """Its build has taken too long, and may still end."""
        with self._changing:
            if self.state is GenerationState.BUILDING:
                self.failure = f"it was not built within {self._wait_s:g} s"
                self._drop()

    def use(self) -> Inner | None:
        """Wait until it is built, and use it from now on; ``None`` if it cannot be used."""
        self._here.wait()
        if not self.settled.wait(self._wait_s):
            self._expire()
        with self._changing:
            if self.state is GenerationState.READY:
                self.state = transition(self.state, GenerationEvent.SWITCHED_TO)
            return self._inner if self.state in IN_USE else None

    def asked(self, question: Callable[[], T]) -> T | None:
        """The answer to a question about an operation of it; ``None`` if it is not in use.

        NCCL answers with the interpreter's lock held, and waits for an abort that has begun, which
        may need that lock. So no question is under way when an abort begins, and none comes after.
        """
        with self._changing:
            return question() if self.state in IN_USE else None

    def switch_to(self) -> None:
        """Use it from now on. Raises IllegalTransition if it is not ready."""
        with self._changing:
            self.state = transition(self.state, GenerationEvent.SWITCHED_TO)

    def drop(self) -> None:
        """It will not be used, if it was not yet."""
        with self._changing:
            self._drop()

    def retire(self) -> None:
        """Another one is used from now on."""
        with self._changing:
            if self.state is GenerationState.LIVE:
                self.state = transition(self.state, GenerationEvent.REPLACED)
            self._drop()

    def lose(self) -> bool:
        """It has lost a member; returns whether it must be aborted."""
        with self._changing:
            self._drop()
            if self.state not in IN_USE:
                return False
            self.state = transition(self.state, GenerationEvent.LOST)
            return True

    def _drop(self) -> None:
        if self.state in (GenerationState.BUILDING, GenerationState.READY):
            self.state = transition(self.state, GenerationEvent.DROPPED)
            self._settle()

    def _settle(self) -> None:
        self.settled.set()
        self._here.set()

    def close(self) -> None:
        """Free it, if it has been built or never will be. Never raises: training goes on."""
        self._close()

    def _close(self, *, unless: GenerationState = GenerationState.FREED) -> None:
        with self._changing:
            may_come = not (self._inner or self._build_over or self.unneeded)
            if self.state in (GenerationState.FREED, unless) or may_come:
                return
            self.state = transition(self.state, GenerationEvent.CLOSED)
            inner, self._inner = self._inner, None
        if inner is not None:
            self._harmless(inner.close, "free")

    def abort(self) -> None:
        """End what runs in it. May hang; never raises."""
        self._harmless(self.inner.abort, "abort")

    def _harmless(self, act: Callable[[], None], what: str) -> None:
        try:
            act()
        except Exception as error:
            log.warning("cannot %s group %s of epoch %d: %s", what, self.name, self.epoch, error)


IN_USE = (GenerationState.LIVE, GenerationState.RETIRED)
"""States in which its operations may run."""
OVER = (GenerationState.DISCARDED, GenerationState.ABORTED, GenerationState.FREED)

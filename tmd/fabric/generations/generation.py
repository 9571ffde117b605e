"""One generation of one group."""

from __future__ import annotations

import threading

from tmd.core.values.model import Membership
from tmd.fabric.generations.inner import Inner
from tmd.fabric.generations.states import GenerationEvent, GenerationState, transition
from tmd.fabric.grouping import GroupView

Members = tuple[str, ...]
"""Workers by rank in the group."""


def members_of(view: GroupView, membership: Membership) -> Members:
    return tuple(membership.members[rank].worker for rank in view.ranks)


class Generation:
    """A group of fixed ``members`` from epoch ``epoch`` on. Thread-safe."""

    def __init__(self, view: GroupView, membership: Membership) -> None:
        self.name = view.name
        self.epoch = membership.epoch
        self.members = members_of(view, membership)
        self.state = GenerationState.BUILDING
        self.failure = ""
        """Why it could not be built."""
        self._inner: Inner | None = None
        self._changing = threading.Lock()

    @property
    def inner(self) -> Inner:
        """The group, from READY until FREED."""
        assert self._inner is not None
        return self._inner

    def built(self, inner: Inner) -> None:
        """The build has ended, perhaps after the generation was dropped."""
        with self._changing:
            self._inner = inner
            if self.state is GenerationState.BUILDING:
                self.state = transition(self.state, GenerationEvent.BUILT)
                return
        self.close()

    def failed(self, why: str) -> None:
        """The build has ended with an error."""
        with self._changing:
            self.failure = why
            if self.state is GenerationState.BUILDING:
                self.state = transition(self.state, GenerationEvent.DROPPED)

    def happens(self, event: GenerationEvent) -> None:
        """Raises IllegalTransition if the table does not allow ``event``."""
        with self._changing:
            self.state = transition(self.state, event)

    def drop(self) -> None:
        """It will not be used."""
        with self._changing:
            if self.state in (GenerationState.BUILDING, GenerationState.READY):
                self.state = transition(self.state, GenerationEvent.DROPPED)

    def close(self) -> None:
        """Free it, if it is no longer in use and has been built."""
        with self._changing:
            inner, self._inner = self._inner, None
            if inner is not None or self.failure:
                self.state = transition(self.state, GenerationEvent.CLOSED)
        if inner is not None:
            inner.close()

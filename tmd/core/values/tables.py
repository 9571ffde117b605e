"""How a state machine reads its table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tmd.core.values.errors import IllegalTransition

State = TypeVar("State")
Event = TypeVar("Event")


def next_state(
    table: Mapping[State, Mapping[Event, State]], state: State, event: Event, refusal: str
) -> State:
    """The state after ``event``.

    Raises:
        IllegalTransition: the table has no such event for ``state``; ``refusal`` is its message.
    """
    after = table[state].get(event)
    if after is None:
        raise IllegalTransition(refusal)
    return after

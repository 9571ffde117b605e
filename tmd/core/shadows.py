"""What a worker says of the rank that it lives the life of."""

from __future__ import annotations

from msgspec import Struct


class ShadowStatus(Struct, frozen=True):
    """How far a worker follows the rank that it lives the life of."""

    rank: int
    copied: float = 0.0
    """Part of the state that has arrived, 0 to 1."""
    lag_s: float = 0.0
    """How long after the rank it began its latest step."""
    verified: int | None = None
    """Newest step at whose start both had the same digest."""
    note: str = ""
    """What was out of the ordinary."""


class Rehearsal(Struct, frozen=True):
    """A standby has tried to live some steps of a rank."""

    step: int
    """At whose start it had the rank's digest after a step of its own; else where it gave up."""
    seconds: float
    refusal: str = ""
    """Why it must not have a rank; empty if it may."""
    note: str = ""
    """Why nothing was found out; it may have a rank."""
    request: str = ""
    """Id of the request that it answers."""

"""Judges whether the store serves this daemon, from the results of each of its loops. Pure.

A daemon uses the store from several loops. If one fails while another succeeds, as when Redis
refuses writes and answers reads, the store must not appear to come and go: it is healthy only once
every loop has succeeded for ``STEADY_S``.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, structs

STEADY_S = 3.0
"""The store is reported as back after this long without any failure."""
CAUSES_REPORTED = 8
"""Causes reported per outage; the rest is dropped so that no log fills up."""


class StoreLoop(StrEnum):
    """The loops of a daemon that use the store, named for their purpose."""

    LEASE = "lease"
    DECIDING = "deciding"
    RECORDS = "records"
    HEARTBEAT = "heartbeat"
    ALERTS = "alerts"
    REQUESTS = "requests"
    WAKE_UPS = "wake-ups"
    WEBHOOK = "webhook"


class HealthChange(StrEnum):
    """Changes that are logged."""

    LOST = "lost"
    OTHER_CAUSE = "other cause"
    BACK = "back"


class StoreState(Struct, frozen=True):
    """A daemon's knowledge of its store."""

    failing: dict[StoreLoop, str] = {}
    """For each loop whose latest attempt failed, the cause in a sentence."""
    down: bool = False
    """Whether the latest report was an outage."""
    reported: tuple[str, ...] = ()
    """Causes already reported in this outage."""
    failed_at: float | None = None
    """Time of the latest failure in this outage (monotonic)."""
    written: bool = False
    """Whether the store has ever accepted a heartbeat, which is a write."""

    @property
    def causes(self) -> tuple[str, ...]:
        """Why the store is not healthy, without repetition; empty if it is.

        An outage that has ended less than ``STEADY_S`` ago keeps its latest causes.
        """
        now = dict.fromkeys(self.failing.values())
        return tuple(now) or (self.reported[-1:] if self.down else ())


HealthOutcome = tuple[StoreState, HealthChange | None]


def failed(state: StoreState, loop: StoreLoop, cause: str, now: float) -> HealthOutcome:
    """After a failed attempt with ``cause`` at ``now`` (monotonic seconds)."""
    after = structs.replace(state, failing={**state.failing, loop: cause}, down=True, failed_at=now)
    if not state.down:
        return structs.replace(after, reported=(cause,)), HealthChange.LOST
    if cause in state.reported or len(state.reported) >= CAUSES_REPORTED:
        return after, None
    return structs.replace(after, reported=(*state.reported, cause)), HealthChange.OTHER_CAUSE


def worked(state: StoreState, loop: StoreLoop, now: float) -> HealthOutcome:
    """After a successful attempt, or where none is needed any more."""
    failing = {a: cause for a, cause in state.failing.items() if a is not loop}
    written = state.written or loop is StoreLoop.HEARTBEAT
    after = structs.replace(state, failing=failing, written=written)
    if state.down and not failing and now - (state.failed_at or 0.0) >= STEADY_S:
        return structs.replace(after, down=False, reported=(), failed_at=None), HealthChange.BACK
    return after, None

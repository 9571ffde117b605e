"""Whether the store serves this daemon, judged from what each of its activities meets. Pure.

A daemon reads and writes the store from several loops. One that fails while another succeeds, as
when Redis refuses writes and answers reads, must not look like a store that comes and goes: the
store is well only when every loop is served, and has been for ``STEADY_S``.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, structs

STEADY_S = 3.0
"""The store is reported as back after this long without any failure."""
CAUSES_REPORTED = 8
"""Per outage: causes beyond these are not reported, so that a log cannot be filled."""


class StoreLoop(StrEnum):
    """The loops of a daemon that use the store, by what they are for."""

    LEASE = "lease"
    DECIDING = "deciding"
    RECORDS = "records"
    HEARTBEAT = "heartbeat"
    ALERTS = "alerts"
    REQUESTS = "requests"
    WAKE_UPS = "wake-ups"
    WEBHOOK = "webhook"


class HealthChange(StrEnum):
    """What is worth a line in the log."""

    LOST = "lost"
    OTHER_CAUSE = "other cause"
    BACK = "back"


class StoreState(Struct, frozen=True):
    """What a daemon knows of its store."""

    failing: dict[StoreLoop, str] = {}
    """The cause, a sentence, for each loop whose latest attempt failed."""
    down: bool = False
    """As it was last reported."""
    reported: tuple[str, ...] = ()
    """Causes reported in this outage."""
    failed_at: float | None = None
    """Monotonic seconds of the latest failure in this outage."""
    written: bool = False
    """Whether a heartbeat, which is a write, has ever been accepted."""

    @property
    def causes(self) -> tuple[str, ...]:
        """Why the store is not well, without repetition; empty if it is well.

        An outage that is over but not yet for ``STEADY_S`` still has its latest causes.
        """
        now = dict.fromkeys(self.failing.values())
        return tuple(now) or (self.reported[-1:] if self.down else ())


Step = tuple[StoreState, HealthChange | None]


def failed(state: StoreState, loop: StoreLoop, cause: str, now: float) -> Step:
    """After an attempt that failed with ``cause`` at ``now`` (monotonic seconds)."""
    after = structs.replace(state, failing={**state.failing, loop: cause}, down=True, failed_at=now)
    if not state.down:
        return structs.replace(after, reported=(cause,)), HealthChange.LOST
    if cause in state.reported or len(state.reported) >= CAUSES_REPORTED:
        return after, None
    return structs.replace(after, reported=(*state.reported, cause)), HealthChange.OTHER_CAUSE


def worked(state: StoreState, loop: StoreLoop, now: float) -> Step:
    """After an attempt that succeeded, or where there is nothing to attempt any more."""
    failing = {a: cause for a, cause in state.failing.items() if a is not loop}
    written = state.written or loop is StoreLoop.HEARTBEAT
    after = structs.replace(state, failing=failing, written=written)
    if state.down and not failing and now - (state.failed_at or 0.0) >= STEADY_S:
        return structs.replace(after, down=False, reported=(), failed_at=None), HealthChange.BACK
    return after, None

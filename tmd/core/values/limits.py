"""What may be configured of decisions and of what they cost, with its defaults."""

from __future__ import annotations

from msgspec import Struct


class PlanLimits(Struct, frozen=True):
    """How long the leader waits, in seconds of its own monotonic clock."""

    prepare_s: float = 600.0
    ready_s: float = 600.0
    switch_s: float = 600.0
    sync_s: float = 600.0
    settle_s: float = 0.5
    """Time to wait for evidence while members are stuck and none is named dead; then run on."""
    silent_s: float = 10.0
    """In a recovery: a worker that must halt and stays silent this long is presumed dead. All
    others have halted by then, so nothing can be committed without it. It is also the time that a
    joiner has whose daemon restarts."""
    abandon_s: float = 10.0
    """Every member's host is there and knows nothing of its worker: the job has failed."""
    hold_s: float = 0.0
    """Longest wait for a standby after a loss; 0 waits for ever."""


class ShadowLimits(Struct, frozen=True):
    """What following a rank may cost, and how good it must be."""

    enabled: bool = True
    """Without it every planned move copies the state at the switch, while all wait."""
    copy_mb_s: float = 256.0
    """Megabytes per second at which a state is copied while its rank trains."""
    staging_mb: float = 1024.0
    """Host memory on each side for what the other has not taken yet, besides three times the
    gradients of a rank; twice as much of both for a standby that rehearses."""
    lag: float = 0.1
    """Part of a step by which a shadow that is in step may be behind."""
    patience_s: float = 120.0
    """From the arrival of the state until it must be in step; then another standby is tried."""


class Understudies(Struct, frozen=True):
    """How many standbys are to follow, and whether all must have done so once."""

    hot: int = 0
    rehearse: bool = False

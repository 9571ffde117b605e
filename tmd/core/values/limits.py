"""Configurable limits of decisions and their costs, with their defaults."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class PlanLimits(Struct, frozen=True):
    """The leader's deadlines, in seconds of its monotonic clock."""

    prepare_s: float = 600.0
    ready_s: float = 600.0
    switch_s: float = 600.0
    sync_s: float = 600.0
    settle_s: float = 0.5
    """Time to wait for evidence while members are stuck and none is named dead."""
    unheard_s: float = 3.0
    """A worker on a host that is gone from the view counts as lost only after this long, even if
    its links broke: right after an outage of Redis, hosts that are well have not reported yet."""
    silent_s: float = 10.0
    """In a recovery: a worker that must halt and stays silent this long is presumed dead. The other
    workers have halted, so that nothing is committed without it. A joiner whose daemon restarts has
    the same time."""
    abandon_s: float = 10.0
    """The job has failed if no member's host knows its worker for this long."""
    hold_s: float = 0.0
    """Longest wait for a standby after a loss; 0 for no limit."""


class ShadowLimits(Struct, frozen=True):
    """Cost limits of a shadow, and its required speed."""

    enabled: bool = True
    """If false, every planned move copies the state at the switch, while all ranks wait."""
    mirror: Literal["auto", "gradients"] = "auto"
    """What the rank of a planned move sends to its shadow. ``auto``: the outputs of all collectives
    if the link can carry them, else only the final gradients. ``gradients``: always these."""
    copy_mb_s: float = 256.0
    """Rate in megabytes per second at which a state is copied while its rank trains."""
    staging_mb: float = 1024.0
    """Host memory on each side for data that waits, beyond three times the gradients of a rank;
    twice as much of both for a standby that rehearses."""
    lag: float = 0.1
    """Fraction of a step by which a shadow in step may lag."""
    patience_s: float = 120.0
    """Time from the arrival of the state until the shadow must be in step."""
    finish_steps: bool = True
    """Whether a step in which a rank is lost is finished with its hot standby."""


class ShadowGoals(Struct, frozen=True):
    """Number of hot standbys, and whether every standby must rehearse."""

    hot: int = 0
    rehearse: bool = False

"""The stored value of the circuit breaker."""

from __future__ import annotations

from msgspec import Struct


class Breaker(Struct, frozen=True):
    """Closed until a condition opens it; only an operator closes it again."""

    open: bool = False
    reason: str = ""
    at: float = 0.0
    """Time at which it was opened or closed."""
    by: str = ""
    """The operator that closed it."""
    counted: dict[str, float] = {}
    """By id, the time of each finding and plan that existed when it was closed, if that time is
    later than ``at``: the clock of its host is ahead."""

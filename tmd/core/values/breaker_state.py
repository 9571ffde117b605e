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
    """Findings and plans, by id, that bear a later time than ``at`` although they were there when
    it was closed, and that time: somebody's clock is ahead."""

"""Whether the circuit breaker is open: the value that is stored."""

from __future__ import annotations

from msgspec import Struct


class Breaker(Struct, frozen=True):
    """Closed until something opens it; closed again by an operator only."""

    open: bool = False
    reason: str = ""
    at: float = 0.0
    """When it was opened, or closed."""
    by: str = ""
    """The operator who closed it."""

"""What an operator asks of the cluster. A request stays until it is answered or withdrawn."""

from __future__ import annotations

from msgspec import Struct


class DrainRequest(Struct, frozen=True):
    """An operator wants a host free of ranks, and kept free until the request is withdrawn."""

    host: str
    id: str
    """Unique; the plan that serves the request carries it."""
    leave: bool = False
    """Its workers exit after the move instead of standing by."""
    by: str = ""
    at: float = 0.0
    soft: bool = False
    """Once a plan has served the request, the workers of the host may take ranks again."""

    @property
    def bars(self) -> bool:
        """Whether the host gets no rank for as long as the request stands."""
        return self.leave or not self.soft


class RehearsalRequest(Struct, frozen=True):
    """The standbys of a host are to show (again) that they compute the bits of their job."""

    host: str
    id: str
    """Unique; the verdict that answers the request carries it."""
    by: str = ""
    at: float = 0.0


class HealthyRequest(Struct, frozen=True):
    """An operator declares findings of a host to be over."""

    host: str
    id: str
    """Unique; the record in the alert stream carries it."""
    code: str = ""
    """Of the findings that are over; empty for all, and for a ban."""
    by: str = ""
    at: float = 0.0

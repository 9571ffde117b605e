"""An operator's requests. A request stays until it is answered or withdrawn."""

from __future__ import annotations

from msgspec import Struct


class DrainRequest(Struct, frozen=True):
    """Free a host of ranks, and keep it free until the request is withdrawn."""

    host: str
    id: str
    """Unique; the plan that serves the request carries it."""
    leave: bool = False
    """Its workers exit after the move instead of becoming standbys."""
    by: str = ""
    at: float = 0.0
    soft: bool = False
    """Whether workers of the host may take ranks again after a loss, once a plan has served the
    request. Planned moves give them none until the request is withdrawn."""
    reserve: bool = False
    """Whether workers of the host may take ranks after a loss if no other standby is left. Planned
    moves give them none until the request is withdrawn."""

    @property
    def bars(self) -> bool:
        """Whether the host gets no rank until the request is withdrawn."""
        return self.leave or not (self.soft or self.reserve)

    def refusal(self, standing: DrainRequest | None) -> str:
        """Why this request cannot replace ``standing``, on which somebody may rely; empty if it
        can, or if there is none."""
        if standing is None:
            return ""
        if standing.leave and not self.leave:
            promised = "its workers exit"
        elif standing.bars and not self.bars:
            promised = "it gets no rank, not even after a loss"
        elif standing.reserve and not (self.reserve or self.bars):
            promised = "it gets a rank only if no other standby is left"
        else:
            return ""
        return (
            f"{standing.by or 'an operator'} has drained {self.host} so that {promised}: run "
            f"'tmd undrain {self.host}' first to withdraw that drain"
        )


class RehearsalRequest(Struct, frozen=True):
    """The standbys of a host must prove (again) that they compute the bits of their job."""

    host: str
    id: str
    """Unique; the verdict that answers the request carries it."""
    by: str = ""
    at: float = 0.0


class HealthyRequest(Struct, frozen=True):
    """Declares findings of a host to be over."""

    host: str
    id: str
    """Unique; the record in the alert stream carries it."""
    code: str = ""
    """Code of the findings; empty for all, including a ban."""
    by: str = ""
    at: float = 0.0

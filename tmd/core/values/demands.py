"""What a policy demands."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Urgency(StrEnum):
    FAILED = "failed"  # the worker is dead or must be treated as dead: failover
    DRAIN = "drain"  # the worker can hand over its rank: planned replacement


class Verdict(Struct, frozen=True):
    """A policy's demand, and its reason."""

    job: str
    worker: str
    urgency: Urgency
    cause: str
    """Code of the alert or the request: ``trainer.exited``, ``drain``."""
    reason: str
    """A sentence for people."""
    policy: str = ""
    leave: bool = False
    """Drain only: the leaver exits after the move instead of returning to the pool."""
    request: str = ""
    """Drain only: id of the drain request."""

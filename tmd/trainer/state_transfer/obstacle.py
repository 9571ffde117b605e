"""What must happen before a worker can carry out a directive, or why it cannot."""

from __future__ import annotations

from msgspec import Struct


class Rebuild(Struct, frozen=True):
    """The model must be built for ``rank`` first; the directive is carried out after that."""

    rank: int
    cold: bool = False
    """Run no shadow iterations after the rebuild."""
    keeps: bool = False
    """Keep the registered values: they are the state of ``rank`` already."""


class NextLoop(Struct, frozen=True):
    """The rank's data position is in a later ``batches()`` call: end the current one."""


class Failed(Struct, frozen=True):
    """The state did not arrive, or does not fit. The worker's status has changed accordingly."""


Obstacle = Rebuild | NextLoop | Failed

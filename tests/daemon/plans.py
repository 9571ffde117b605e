"""Plans that the daemon's tests obey."""

from __future__ import annotations

from tmd.core.model import Kind, MigrationPlan, Phase


def failover(record, *dead):
    """A failover of the job of ``record`` that names ``dead`` and waits for the others to halt."""
    return MigrationPlan(
        id="job-2",
        kind=Kind.FAILOVER,
        phase=Phase.RECOVER,
        moves=(),
        old=record.membership,
        new=record.membership,
        cause="trainer.stalled",
        reason="silent",
        dead=dead,
    )

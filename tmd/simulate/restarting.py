"""Restart from checkpoints, with hosts in reserve that run nothing. A model."""

from __future__ import annotations

from tmd.simulate.costs import Costs
from tmd.simulate.places import Places
from tmd.simulate.values import (
    TRAINING,
    Cause,
    Fault,
    FaultScope,
    Job,
    LostWork,
    NextPhase,
    Warned,
    WorkDone,
    holding,
    restarting,
    unsaved,
)


class Restarting(Places):
    """All workers end at each loss and start again from the newest checkpoint."""

    def __init__(self, job: Job, spares: int, costs: Costs) -> None:
        super().__init__(job, spares)
        self._costs = costs

    def warned(self, host: str, how: Warned, now: float, work: WorkDone) -> NextPhase | None:
        return None  # the job restarts when the fault comes

    def lost(self, host: str, fault: Fault, now: float, work: WorkDone) -> NextPhase | None:
        trained = host in self._ranks if fault.scope is FaultScope.WORKER else self._remove(host)
        if not trained:
            return None
        if fault.warned is not Warned.NOT:
            # It saves before the host leaves, so that nothing is repeated.
            return self._restarts((), Cause.PLANNED_MOVE, self._costs.save_s)
        return self._restarts(unsaved(work))

    def crashed(self, now: float, work: WorkDone) -> NextPhase | None:
        return self._restarts(unsaved(work))

    def came(self, host: str, now: float, work: WorkDone) -> NextPhase | None:
        if self.has(host):
            return None  # only its worker had ended
        self._add(host)
        return self._restarts(()) if None in self._ranks else None

    def proceed(self, now: float, work: WorkDone) -> NextPhase | None:
        return TRAINING

    def _restarts(
        self, losses: tuple[LostWork, ...], cause: Cause = Cause.RESTART, more_s: float = 0.0
    ) -> NextPhase:
        """The job restarts on all its hosts, or waits for one."""
        self._fill()
        if None in self._ranks:
            return holding(losses)
        return restarting(self._costs.restart_s + more_s, losses, cause)

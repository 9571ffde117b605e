"""Restart from checkpoints, with hosts in reserve that run nothing. A model."""

from __future__ import annotations

from tmd.simulate.costs import Costs
from tmd.simulate.phases import Event
from tmd.simulate.values import Cause, Fault, Fells, Job, Loss, Turn, Warned, Work


class Restarting:
    """All workers end at each loss and start again from the newest checkpoint."""

    def __init__(self, job: Job, spares: int, costs: Costs) -> None:
        self._costs = costs
        self._ranks: list[str | None] = [f"host-{n}" for n in range(job.hosts)]
        self._idle = [f"host-{job.hosts + n}" for n in range(spares)]
        self._up = {host for host in (*self._ranks, *self._idle) if host is not None}

    def at(self, place: int) -> str | None:
        ranks = len(self._ranks)
        if place < ranks:
            return self._ranks[place]
        return self._idle[place - ranks] if place - ranks < len(self._idle) else None

    def has(self, host: str) -> bool:
        return host in self._up

    def warned(self, host: str, how: Warned, now: float, work: Work) -> Turn | None:
        return None  # it can only restart, at the fault as well as before

    def lost(self, host: str, fault: Fault, now: float, work: Work) -> Turn | None:
        stays = fault.fells is Fells.WORKER
        if not stays:
            self._up.discard(host)
        if host in self._idle:
            if not stays:
                self._idle.remove(host)
            return None
        if host not in self._ranks:
            return None
        if not stays:
            self._ranks[self._ranks.index(host)] = None
        if fault.warned is not Warned.NOT:
            # It saves before the host leaves, so that nothing is repeated.
            return self._filled((), Cause.PLANNED_MOVE, self._costs.save_s)
        return self._filled((Loss(Cause.REPEATED_STEPS, work.unsaved_s),))

    def crashed(self, now: float, work: Work) -> Turn | None:
        return self._filled((Loss(Cause.REPEATED_STEPS, work.unsaved_s),))

    def came(self, host: str, now: float, work: Work) -> Turn | None:
        if host in self._up:
            return None
        self._up.add(host)
        self._idle.append(host)
        return self._filled(()) if None in self._ranks else None

    def proceed(self, now: float, work: Work) -> Turn | None:
        return Turn(Event.TRAINS)

    def _filled(
        self, losses: tuple[Loss, ...], cause: Cause = Cause.RESTART, more_s: float = 0.0
    ) -> Turn:
        for rank, host in enumerate(self._ranks):
            if host is None and self._idle:
                self._ranks[rank] = self._idle.pop(0)
        if None in self._ranks:
            return Turn(Event.HOLDS, cause=Cause.HOLD, losses=losses, from_checkpoint=True)
        lasts = self._costs.restart_s + more_s
        return Turn(Event.STANDS, lasts, cause, losses, from_checkpoint=True)

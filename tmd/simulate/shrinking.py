"""Elastic shrinking: the job goes on with fewer replicas. A model of a rival.

A replica that lacks a host does not train, and the others do not wait for it. A host in reserve, or
one that is back, takes the place of a lost one after the time of a start. Healthy hosts of broken
replicas make whole ones in the pause of a resize. A host that waits for others keeps its part of
the state in step: it takes part in the averages of gradients, and adds none. Losses and weights
differ from those of an undisturbed job; the model counts batches only.
"""

from __future__ import annotations

import math
from itertools import chain

from tmd.simulate.costs import Costs
from tmd.simulate.places import Places
from tmd.simulate.values import (
    Cause,
    Fault,
    Job,
    LostWork,
    NextPhase,
    Warned,
    WorkDone,
    holding,
    restarting,
    unsaved,
)

MOMENT_S = 1e-6
"""Rounding of virtual time."""


class Shrinking(Places):
    """Goes on with the replicas that are whole."""

    def __init__(self, job: Job, spares: int, costs: Costs) -> None:
        super().__init__(job, spares)
        self._job, self._costs = job, costs
        self._ready: dict[str, float] = {}
        """Hosts that start for the place of a lost one, and when they are ready."""
        self._stands: Cause | None = None
        """Why the job stands still; ``None`` while it trains."""

    def warned(self, host: str, how: Warned, now: float, work: WorkDone) -> NextPhase | None:
        return None  # it can only go on without the host, at the fault as well as before

    def lost(self, host: str, fault: Fault, now: float, work: WorkDone) -> NextPhase | None:
        before = self._whole()
        if not self._remove(host):
            return None
        self._ready.pop(host, None)
        planned = fault.warned is not Warned.NOT
        trained, kept = self._whole() < before, planned or self._holds_state()
        self._regroup()
        self._start(now)
        if not trained:
            return self._trains(now) if self._stands is None else None
        if self._stands is Cause.RESTART:
            return self._restarts(())
        if not kept or not self._whole():
            # The state is lost with the last host of a part, unless it is saved before.
            return self._restarts(() if planned else unsaved(work))
        step = () if planned else (LostWork(Cause.INTERRUPTED_STEP, work.in_step_s),)
        return self._resizes(Cause.PLANNED_MOVE if planned else Cause.RESIZE, step)

    def crashed(self, now: float, work: WorkDone) -> NextPhase | None:
        return self._restarts(unsaved(work))

    def came(self, host: str, now: float, work: WorkDone) -> NextPhase | None:
        self._add(host)
        self._start(now)
        if self._stands is Cause.HOLD:
            return self._restarts(())
        return self._trains(now) if self._stands is None else None

    def proceed(self, now: float, work: WorkDone) -> NextPhase | None:
        before = self._whole()
        for host in [h for h, at in self._ready.items() if at <= now + MOMENT_S]:
            del self._ready[host]
        self._regroup()
        if self._stands is None and self._whole() > before:
            return self._resizes(Cause.RESIZE, ())
        self._stands = None
        return self._trains(now)

    # --- decisions --------------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        """Hosts without a rank start for the places of lost ones."""
        for host in self._fill():
            self._ready[host] = now + self._costs.restart_s

    def _trains(self, now: float) -> NextPhase:
        until = min(self._ready.values(), default=math.inf)
        speed = self._whole() / self._job.replicas
        return NextPhase(max(0.0, until - now), speed=speed)

    def _resizes(self, cause: Cause, losses: tuple[LostWork, ...]) -> NextPhase:
        self._stands = cause
        return NextPhase(self._costs.resize_s, cause, losses)

    def _restarts(self, losses: tuple[LostWork, ...]) -> NextPhase:
        """All whole replicas of the hosts that are up start from a checkpoint, or the job waits."""
        self._ready.clear()
        self._regroup()
        if not self._whole():
            self._stands = Cause.HOLD
            return holding(losses)
        self._stands = Cause.RESTART
        return restarting(self._costs.restart_s, losses)

    # --- replicas ---------------------------------------------------------------------------------

    def _works(self, place: int) -> bool:
        """Whether the host in a place is up, and has started."""
        host = self._ranks[place]
        return host is not None and host not in self._ready

    def _whole(self) -> int:
        """Replicas whose hosts all train."""
        return sum(all(map(self._works, replica)) for replica in self._replicas())

    def _holds_state(self) -> bool:
        """Whether each part of the state is on a host that works."""
        size, places = self._job.replica_hosts, len(self._ranks)
        return all(any(map(self._works, range(n, places, size))) for n in range(size))

    def _regroup(self) -> None:
        """Hosts of broken replicas make as many whole ones as they can."""
        size = self._job.replica_hosts
        broken = [r for r in self._replicas() if not all(map(self._works, r))]
        while sum(map(self._works, chain(*broken))) >= size:
            filled = max(broken, key=lambda replica: sum(map(self._works, replica)))
            broken.remove(filled)
            for place in filled:
                if not self._works(place):
                    spare = [p for p in chain(*broken) if self._works(p)]
                    # A host with the same part of the state has no need to copy one.
                    other = min(spare, key=lambda p: (p - place) % size != 0)
                    ranks = self._ranks
                    ranks[place], ranks[other] = ranks[other], ranks[place]

    def _replicas(self) -> list[range]:
        """The places of each replica."""
        size = self._job.replica_hosts
        return [range(n, n + size) for n in range(0, len(self._ranks), size)]

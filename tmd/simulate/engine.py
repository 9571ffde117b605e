"""Plays a trace of faults against one recovery setup: a discrete-event simulation. Pure.

Faults, returns of hosts and ends of pauses are the only events. Between two of them the ledger
counts time in closed form, so that the cost of a run depends on the number of faults only.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Protocol

from tmd.simulate.ledger import TimeLedger, TrainingPace
from tmd.simulate.values import (
    HOUR,
    TRAINING,
    Cause,
    Fault,
    FaultScope,
    Job,
    NextPhase,
    Outcome,
    RecoverySetup,
    Warned,
    WorkDone,
)


class LossHandling(Protocol):
    """How a setup goes on. Each function is one event; ``None``: the job does what it did."""

    def at(self, place: int) -> str | None:
        """The host in a place, or ``None`` if there is none now."""

    def has(self, host: str) -> bool:
        """Whether ``host`` is up."""

    def warned(self, host: str, how: Warned, now: float, work: WorkDone) -> NextPhase | None:
        """``host`` will be lost later."""

    def lost(self, host: str, fault: Fault, now: float, work: WorkDone) -> NextPhase | None:
        """``host``, or only its worker, is lost."""

    def crashed(self, now: float, work: WorkDone) -> NextPhase | None:
        """All workers have ended."""

    def came(self, host: str, now: float, work: WorkDone) -> NextPhase | None:
        """``host``, or only its worker, is back."""

    def proceed(self, now: float, work: WorkDone) -> NextPhase | None:
        """The time of the latest decision is over."""


class _Run:
    """One run; the methods are its events."""

    def __init__(
        self, handling: LossHandling, pace: TrainingPace, whole_s: float, rejoin_s: float
    ) -> None:
        self.handling = handling
        self.ledger = TimeLedger(pace)
        self.counts: Counter[str] = Counter()
        self.struck = 0
        self.returns = 0
        """Returns to a checkpoint after which work is repeated."""
        self.trained_s = 0.0
        self._whole_s, self._rejoin_s = whole_s, rejoin_s
        self._now = 0.0
        self._chosen = TRAINING
        self._queue: list[tuple[float, int, Callable[[], NextPhase | None]]] = []
        self._order = count()
        self._timer = 0
        self._returns: dict[str, int] = {}
        """The latest loss of each host: only the return from that one counts."""

    def play(self, trace: Sequence[Fault]) -> None:
        for fault in trace:
            if fault.warned is Warned.NOT:
                self._at(fault.at_s, partial(self._strike, fault, None))
            else:
                begin = max(0.0, fault.at_s - fault.notice_s)
                self._at(begin, partial(self._warn, fault))
        while self._queue and self._queue[0][0] < self._whole_s:
            at, _, event = heapq.heappop(self._queue)
            self._pass(at)
            chosen = event()
            if chosen is not None:
                self._take(chosen)
        self._pass(self._whole_s)

    def _at(self, when: float, event: Callable[[], NextPhase | None]) -> None:
        if math.isfinite(when):
            heapq.heappush(self._queue, (when, next(self._order), event))

    def _pass(self, until: float) -> None:
        """Count the time up to ``until``."""
        seconds, self._now = until - self._now, until
        if self._chosen.cause is None:
            self.trained_s += seconds
            self.ledger.train(seconds, self._chosen.speed)
        else:
            self.ledger.stand(seconds, self._chosen.cause)

    def _take(self, chosen: NextPhase) -> None:
        for loss in chosen.losses:
            self.ledger.lose(loss)
        if chosen.from_checkpoint:
            self.returns += any(loss.seconds > 0 for loss in chosen.losses)
            self.ledger.from_checkpoint()
        if chosen.cause is not None:
            self.counts[str(chosen.cause)] += 1
        self._chosen = chosen
        self._timer += 1
        self._at(self._now + chosen.lasts_s, partial(self._ended, self._timer))

    def _ended(self, number: int) -> NextPhase | None:
        """The time of a decision is over, unless a later one has replaced it."""
        if number != self._timer:
            return None
        return self.handling.proceed(self._now, self.ledger.work)

    def _warn(self, fault: Fault) -> NextPhase | None:
        host = self.handling.at(fault.place)
        if host is None:
            return None
        self._at(fault.at_s, partial(self._strike, fault, host))
        return self.handling.warned(host, fault.warned, self._now, self.ledger.work)

    def _strike(self, fault: Fault, named: str | None) -> NextPhase | None:
        work = self.ledger.work
        if fault.scope is FaultScope.JOB:
            self.struck += 1
            return self.handling.crashed(self._now, work)
        host = named or self.handling.at(fault.place)
        if host is None or not self.handling.has(host):
            return None
        self.struck += 1
        away = self._rejoin_s if fault.scope is FaultScope.WORKER else fault.repair_s
        self._returns[host] = number = self.struck
        self._at(self._now + away, partial(self._back, host, number))
        return self.handling.lost(host, fault, self._now, work)

    def _back(self, host: str, number: int) -> NextPhase | None:
        if self._returns[host] != number:
            return None
        return self.handling.came(host, self._now, self.ledger.work)


def run(
    trace: Sequence[Fault],
    job: Job,
    setup: RecoverySetup,
    handling: LossHandling,
    pace: TrainingPace,
    rejoin_s: float,
) -> Outcome:
    """The outcome of ``setup`` on ``trace``."""
    one = _Run(handling, pace, job.whole_s, rejoin_s)
    one.play(trace)
    lost = {cause: seconds / HOUR for cause, seconds in one.ledger.lost_s.items() if seconds > 0}
    return Outcome(
        setup=setup,
        hours=job.hours,
        useful=one.ledger.useful_s / HOUR,
        lost={cause.value: lost[cause] for cause in Cause if cause in lost},
        faults=float(one.struck),
        counts={name: float(n) for name, n in one.counts.items()},
        checkpoint_s=pace.every_s,
    )


def between_returns_s(
    trace: Sequence[Fault], job: Job, handling: LossHandling, pace: TrainingPace, rejoin_s: float
) -> float:
    """Mean time of training between two returns to a checkpoint after which work is repeated.

    It is all time of training if the job never returns.
    """
    one = _Run(handling, pace, job.whole_s, rejoin_s)
    one.play(trace)
    return one.trained_s / max(1, one.returns)

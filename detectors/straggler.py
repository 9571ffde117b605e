"""A rank that computes more slowly than its peers, and a job whose steps have become slower.

The trainers measure and compare: the vote at the end of a step tells each of them all compute
times, so they judge the same steps, wherever the ranks are. What is left for this detector is to
say of its own host's workers what they found, and when it is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import ClassVar

from tmd.plugin import (
    Activity,
    Detector,
    DetectorContext,
    Pace,
    Severity,
    Signal,
    State,
    WorkerEvent,
)

SLOW = "straggler.slow"
JOB_SLOW = "straggler.job_slow"


class StragglerDetector(Detector):
    name: ClassVar[str] = "straggler"
    deadline_s: ClassVar[float | None] = 30.0

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        findings = StragglerFindings()
        async for event in ctx.worker_events():
            for found in findings.observe(event):
                yield found


class StragglerFindings:
    """Folds events into signals; says each thing once."""

    def __init__(self) -> None:
        self._raised: dict[tuple[str, str], str] = {}
        """(code, worker) -> what it was raised about."""

    def observe(self, event: WorkerEvent) -> Iterator[Signal]:
        status = event.status
        gone = event.forgotten or event.exit is not None or status is None
        if not gone and not event.connected:
            return  # doubt: what it said last may hold or not
        trains = not gone and status is not None and status.activity is Activity.TRAINING
        if not gone and not trains and status is not None and status.rank is not None:
            return  # its step is disturbed, which says nothing about how fast it computes
        pace = status.pace if trains and status is not None else None
        slow = pace if pace is not None and pace.slow_since is not None else None
        yield from self._tell(SLOW, Severity.DEGRADED, event, event.worker, _words(slow))
        # The steps of all are equally long: one of them says so.
        first = trains and status is not None and status.rank == 0
        slower = "its steps take longer than they did" if first and pace and pace.group_slow else ""
        entity = f"job:{event.job}"
        yield from self._tell(JOB_SLOW, Severity.WARNING, event, entity, slower)

    def _tell(
        self, code: str, severity: Severity, event: WorkerEvent, entity: str, message: str
    ) -> Iterator[Signal]:
        key = (code, event.worker)
        if bool(message) == (key in self._raised):
            return
        if message:
            self._raised[key] = entity
        else:
            entity = self._raised.pop(key)
        state = State.RAISED if message else State.CLEARED
        yield Signal(code, entity, severity, state, message, event.job)


def _words(pace: Pace | None) -> str:
    if pace is None:
        return ""
    return (
        f"computes {pace.ratio:.2f} times as long as its peers since step {pace.slow_since}: "
        f"{pace.busy_s:.3f} s a step"
    )

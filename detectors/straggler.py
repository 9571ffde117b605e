"""Ranks that compute more slowly than their peers, and jobs whose steps have become slower.

The trainers measure and compare: the vote at the end of a step carries all compute times to every
rank, so all judge the same steps. This detector raises and clears the findings about the
workers of its own host.
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
    """Turns events into signals; reports each finding once."""

    def __init__(self) -> None:
        self._raised: dict[tuple[str, str], str] = {}
        """(code, worker) -> the entity for which it was raised."""

    def observe(self, event: WorkerEvent) -> Iterator[Signal]:
        status = event.status
        gone = event.forgotten or event.exit is not None or status is None
        if not gone and not event.connected:
            return  # unknown: its last finding may or may not hold
        trains = not gone and status is not None and status.activity is Activity.TRAINING
        if not gone and not trains and status is not None and status.rank is not None:
            return  # a disturbed step says nothing about speed: the finding stays
        pace = status.pace if trains and status is not None else None
        slow = pace if pace is not None and pace.slow_since is not None else None
        yield from self._report(SLOW, Severity.DEGRADED, event, event.worker, _message(slow))
        # The steps of all ranks take equally long: one rank reports it.
        first = trains and status is not None and status.rank == 0
        slower = "its steps take longer than before" if first and pace and pace.group_slow else ""
        entity = f"job:{event.job}"
        yield from self._report(JOB_SLOW, Severity.WARNING, event, entity, slower)

    def _report(
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


def _message(pace: Pace | None) -> str:
    if pace is None:
        return ""
    return (
        f"has computed {pace.ratio:.2f} times as long as its peers since step {pace.slow_since}: "
        f"{pace.busy_s:.3f} s a step"
    )

"""The straggler detector's findings about its host's workers."""

from __future__ import annotations

import pytest
from msgspec import structs
from tmd_detectors.straggler import JOB_SLOW, SLOW, StragglerDetector, StragglerFindings

from tmd.plugin import Activity, Exit, Pace, Severity, State, WorkerEvent
from tmd.testing import FakeContext
from tmd.testing.clients import worker_status

WORKER = "h1/job/0.a"
WELL = Pace(step=100, busy_s=0.4, ratio=1.0)
SLOWED = Pace(step=160, busy_s=0.52, ratio=1.3, slow_since=140, lost_s=2.0)


def event(pace, *, activity=Activity.TRAINING, rank=1, **changes):
    status = structs.replace(worker_status(WORKER), activity=activity, rank=rank, pace=pace)
    return structs.replace(
        WorkerEvent(worker=WORKER, job="job", status=status, connected=True), **changes
    )


def signals(*events):
    findings = StragglerFindings()
    return [(s.code, s.state) for e in events for s in findings.observe(e)]


RAISED, CLEARED = (SLOW, State.RAISED), (SLOW, State.CLEARED)


def test_a_slow_worker_is_raised_once_with_figures_and_cleared_once():
    findings = StragglerFindings()
    events = (event(WELL), event(SLOWED), event(SLOWED), event(WELL), event(WELL))
    raised, cleared = [s for e in events for s in findings.observe(e)]

    assert (raised.entity, raised.job, raised.severity) == (WORKER, "job", Severity.DEGRADED)
    for word in ("1.30 times", "step 140", "0.520 s"):
        assert word in raised.message
    assert (cleared.code, cleared.entity, cleared.state) == (SLOW, WORKER, State.CLEARED)


@pytest.mark.parametrize(
    "over",
    [
        event(SLOWED, exit=Exit(WORKER, "job", 0, 0.0)),
        event(SLOWED, forgotten=True),
        event(SLOWED, activity=Activity.STANDBY, rank=None),
        event(None),
    ],
    ids=["ended", "forgotten", "holds no rank", "says nothing of it"],
)
def test_slowness_clears_when_the_worker_loses_the_rank(over):
    assert signals(event(SLOWED), over) == [RAISED, CLEARED]


@pytest.mark.parametrize(
    "doubtful",
    [event(WELL, connected=False), event(WELL, activity=Activity.STUCK)],
    ids=["not connected", "stuck"],
)
def test_an_unclear_status_changes_no_finding(doubtful):
    assert signals(doubtful, event(SLOWED), doubtful) == [RAISED]


def test_only_rank_0_reports_a_job_that_got_slower():
    slower = structs.replace(WELL, group_slow=True)

    assert signals(event(slower), event(slower)) == []
    assert signals(event(slower, rank=0), event(WELL, rank=0)) == [
        (JOB_SLOW, State.RAISED),
        (JOB_SLOW, State.CLEARED),
    ]


def test_a_slower_job_is_reported_about_the_job():
    (signal,) = StragglerFindings().observe(event(structs.replace(WELL, group_slow=True), rank=0))

    assert (signal.entity, signal.severity) == ("job:job", Severity.WARNING)


async def test_the_detector_gets_the_workers_of_its_host():
    context = FakeContext()
    context.tell(event(SLOWED))
    signals = StragglerDetector().watch(context)
    first = await anext(signals)
    await signals.aclose()

    assert first.code == SLOW

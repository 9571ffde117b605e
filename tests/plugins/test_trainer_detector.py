"""The detector of training processes."""

from __future__ import annotations

import pytest
from msgspec import structs
from tmd_detectors.trainer import EXITED, HUNG, STALLED, Findings, TrainerConfig

from tmd.plugin import Activity, Exit, Severity, State, WorkerEvent
from tmd.testing.clients import worker_status

WORKER = "h1/job/0.a"
STATUS = structs.replace(worker_status(WORKER), activity=Activity.TRAINING, epoch=1, step=5)
CONFIG = TrainerConfig(heartbeat_timeout_s=5, progress_timeout_s=600)


def speaks(status=STATUS, silent_s=0.0, connected=True):
    return WorkerEvent(
        worker=WORKER, job="job", status=status, connected=connected, silent_s=silent_s
    )


def ends(code, forgotten=False):
    return WorkerEvent(
        worker=WORKER, job="job", exit=Exit(WORKER, "job", code, at=0.0), forgotten=forgotten
    )


@pytest.fixture
def see():
    """Feed an event; returns the (code, state) of the signals."""
    findings = Findings(CONFIG)

    def observe(event, now=0.0):
        return [(s.code, s.state) for s in findings.observe(event, now)]

    return observe


def test_an_exit_with_an_error_is_fatal_and_belongs_to_the_job():
    (signal,) = Findings(CONFIG).observe(ends(-9), 0.0)

    assert (signal.code, signal.entity, signal.job) == (EXITED, WORKER, "job")
    assert signal.severity is Severity.FATAL
    assert "signal 9" in signal.message


def test_each_thing_is_said_once(see):
    first = see(ends(1))

    assert first == [(EXITED, State.RAISED)]
    assert see(ends(1)) == []


def test_the_end_of_training_is_no_fault(see):
    assert see(ends(0)) == []


def test_what_the_host_forgets_is_cleared(see):
    see(ends(1))

    assert see(ends(1, forgotten=True)) == [(EXITED, State.CLEARED)]


def test_a_silent_trainer_is_stalled_until_it_speaks(see):
    assert see(speaks(silent_s=4.9)) == []
    assert see(speaks(silent_s=5.1)) == [(STALLED, State.RAISED)]
    assert see(speaks(silent_s=9.0)) == []
    assert see(speaks(silent_s=0.1)) == [(STALLED, State.CLEARED)]


def test_the_exit_of_a_stalled_trainer_says_more(see):
    see(speaks(silent_s=6))

    assert see(ends(-9)) == [(STALLED, State.CLEARED), (EXITED, State.RAISED)]


def test_who_is_not_connected_is_not_accused(see):
    """Its daemon or its link may be at fault; the launcher tells of exits."""
    assert see(speaks(silent_s=100, connected=False)) == []


def test_standing_still_of_its_own_accord_is_hanging(see):
    assert see(speaks(), now=0) == []
    assert see(speaks(), now=599) == []
    assert see(speaks(), now=601) == [(HUNG, State.RAISED)]
    moved = structs.replace(STATUS, step=6)
    assert see(speaks(moved), now=602) == [(HUNG, State.CLEARED)]


@pytest.mark.parametrize(
    "innocent",
    [
        structs.replace(STATUS, waiting=True),
        structs.replace(STATUS, activity=Activity.STUCK),
        structs.replace(STATUS, activity=Activity.STANDBY),
        structs.replace(STATUS, activity=Activity.STARTING),
    ],
    ids=["waits for others", "stuck", "standby", "starting"],
)
def test_who_waits_for_others_does_not_hang(see, innocent):
    see(speaks(), now=0)
    see(speaks(innocent), now=599)

    assert see(speaks(innocent), now=2000) == []
    assert see(speaks(), now=2001) == []


def test_a_new_epoch_is_progress(see):
    """Recovery may run the same step again."""
    see(speaks(), now=0)
    see(speaks(structs.replace(STATUS, epoch=2)), now=599)

    assert see(speaks(structs.replace(STATUS, epoch=2)), now=700) == []

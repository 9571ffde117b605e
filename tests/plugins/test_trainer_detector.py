"""The detector of training processes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest
from msgspec import structs
from tmd_detectors.trainer import (
    EXITED,
    HUNG,
    NAN_LOSS,
    NO_CHECKPOINT,
    OUT_OF_MEMORY,
    RANK_KEPT,
    REFUSED,
    STALLED,
    UNFIT,
    UNREGISTERED,
    Kills,
    TrainerConfig,
    TrainerDetector,
    TrainerFindings,
)

from tmd.core.values.checkpoints import MissedCheckpoint
from tmd.core.values.shadows import Rehearsal
from tmd.plugin import Activity, Exit, Severity, State, WorkerEvent
from tmd.testing import FakeContext
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
    findings = TrainerFindings(CONFIG)

    def observe(event, now=0.0):
        return [(s.code, s.state) for s in findings.observe(event, now)]

    return observe


def test_an_exit_with_an_error_is_fatal_and_belongs_to_the_job():
    (signal,) = TrainerFindings(CONFIG).observe(ends(-9), 0.0)

    assert (signal.code, signal.entity, signal.job) == (EXITED, WORKER, "job")
    assert signal.severity is Severity.FATAL
    assert "signal 9" in signal.message


@pytest.mark.parametrize(
    ("code", "again"), [("", [STALLED]), (STALLED, [STALLED]), (HUNG, []), ("nvml.ecc", [])]
)
def test_a_silent_worker_is_reported_again_after_it_was_declared_healthy(code, again):
    """It stands still as before, and is never replaced without a finding. An ended one is not."""
    findings = TrainerFindings(CONFIG)
    silent = speaks(silent_s=9.0)
    (first,) = findings.observe(silent, 0.0)
    findings.state_again(code)
    second = list(findings.observe(silent, 1.0))
    list(findings.observe(ends(1), 2.0))
    findings.state_again(code)

    assert first.code == STALLED
    assert [(s.code, s.state) for s in second] == [(c, State.RAISED) for c in again]
    assert list(findings.observe(ends(1), 3.0)) == []


def test_each_finding_is_reported_once(see):
    first = see(ends(1))

    assert first == [(EXITED, State.RAISED)]
    assert see(ends(1)) == []


def test_the_end_of_training_is_no_finding(see):
    assert see(ends(0)) == []


def test_an_exit_is_reported_with_its_code(see):
    """The exit code is unknown until the kernel is done; the policy does not wait for this."""
    see(speaks(silent_s=6))

    assert see(ends(None)) == []
    assert see(ends(-9)) == [(STALLED, State.CLEARED), (EXITED, State.RAISED)]


def test_forgotten_exits_clear_their_findings(see):
    see(ends(1))

    assert see(ends(1, forgotten=True)) == [(EXITED, State.CLEARED)]


def test_a_silent_trainer_is_stalled_until_it_reports(see):
    assert see(speaks(silent_s=4.9)) == []
    assert see(speaks(silent_s=5.1)) == [(STALLED, State.RAISED)]
    assert see(speaks(silent_s=9.0)) == []
    assert see(speaks(silent_s=0.1)) == [(STALLED, State.CLEARED)]


def test_the_exit_of_a_stalled_trainer_replaces_the_stall(see):
    see(speaks(silent_s=6))

    assert see(ends(-9)) == [(STALLED, State.CLEARED), (EXITED, State.RAISED)]


def test_an_unconnected_worker_is_not_reported(see):
    """Its daemon or its link may be at fault; the launcher reports exits."""
    assert see(speaks(silent_s=100, connected=False)) == []


def test_a_worker_that_stands_still_without_waiting_hangs(see):
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
def test_a_worker_that_waits_for_others_does_not_hang(see, innocent):
    see(speaks(), now=0)
    see(speaks(innocent), now=599)

    assert see(speaks(innocent), now=2000) == []
    assert see(speaks(), now=2001) == []


def test_a_new_epoch_is_progress(see):
    """Recovery may run the same step again."""
    see(speaks(), now=0)
    see(speaks(structs.replace(STATUS, epoch=2)), now=599)

    assert see(speaks(structs.replace(STATUS, epoch=2)), now=700) == []


# --- for people -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_nan_loss_is_reported_and_moves_no_rank(loss):
    """A WARNING: a new host would compute the same."""
    findings = TrainerFindings(CONFIG)
    wrong, right = structs.replace(STATUS, loss=loss), structs.replace(STATUS, loss=1.5)
    first = list(findings.observe(speaks(wrong), 0.0))
    again = list(findings.observe(speaks(wrong), 1.0))
    unknown = list(findings.observe(speaks(structs.replace(STATUS, loss=None)), 2.0))
    well = list(findings.observe(speaks(right), 3.0))

    assert [(s.code, s.severity, s.state) for s in first] == [
        (NAN_LOSS, Severity.WARNING, State.RAISED)
    ]
    assert again == unknown == []
    # A cleared finding keeps the message with which it was raised.
    assert [(s.code, s.state, s.message) for s in well] == [(NAN_LOSS, State.CLEARED, "")]


def test_an_ordinary_loss_is_no_finding(see):
    assert see(speaks(structs.replace(STATUS, loss=0.0))) == []


def test_the_exit_of_a_trainer_clears_its_loss_finding(see):
    see(speaks(structs.replace(STATUS, loss=float("nan"))))

    assert see(ends(0)) == [(NAN_LOSS, State.CLEARED)]


def test_a_kill_for_memory_is_reported_with_the_exit():
    findings = TrainerFindings(CONFIG)
    found = [(s.code, s.severity) for s in findings.observe(ends(-9), 0.0, starved=True)]
    again = list(findings.observe(ends(-9), 1.0))
    over = {s.code for s in findings.observe(ends(-9, forgotten=True), 2.0)}

    assert set(found) == {(OUT_OF_MEMORY, Severity.WARNING), (EXITED, Severity.FATAL)}
    assert again == []
    assert over == {OUT_OF_MEMORY, EXITED}


def test_each_kill_of_the_last_seconds_explains_one_exit(tmp_path):
    """A large process exits long after it was killed, and the count was read in between."""
    file = tmp_path / "vmstat"
    file.write_text("nr_free_pages 9\noom_kill 3\n")
    kills = Kills(tmp_path)
    kills.look(0.0)
    before = kills.explains(0.0)
    file.write_text("oom_kill 5\n")
    for second in range(1, 4):
        kills.look(float(second))
    found = [kills.explains(4.0) for _ in range(3)]

    assert not before
    assert found == [True, True, False]


def test_a_kill_while_nobody_looked_explains_no_exit(tmp_path):
    """The host had no worker for a while."""
    file = tmp_path / "vmstat"
    file.write_text("oom_kill 3\n")
    kills = Kills(tmp_path)
    kills.look(0.0)
    file.write_text("oom_kill 4\n")
    kills.look(3600.0)

    assert not kills.explains(3605.0)


@pytest.mark.parametrize(("ends_at", "explained"), [(12, True), (20, False)])
def test_an_old_kill_explains_no_exit(tmp_path, ends_at, explained):
    """It was killed between 2 and 3 s."""
    file = tmp_path / "vmstat"
    file.write_text("oom_kill 3\n")
    kills = Kills(tmp_path)
    for second in range(ends_at):
        kills.look(float(second))
        if second == 2:
            file.write_text("oom_kill 4\n")

    assert kills.explains(float(ends_at)) is explained


def test_a_kernel_without_the_counter_is_no_error(tmp_path):
    kills = Kills(tmp_path)
    kills.look(0.0)

    assert not kills.explains(0.0)


@asynccontextmanager
async def counting(tmp_path):
    """A detector that has read a count of three kills; its context, its signals and the first of
    these, which has yet to come."""
    (tmp_path / "vmstat").write_text("oom_kill 3\n")
    context = FakeContext(TrainerConfig(proc_root=str(tmp_path)))
    async with aclosing(TrainerDetector().watch(context)) as signals:
        context.tell(speaks())
        first = asyncio.create_task(anext(signals))
        await context.idle.wait()
        yield context, signals, first


async def test_a_declaration_of_health_reaches_the_findings(tmp_path):
    """Also one from before the detector runs does no harm."""
    context, detector = FakeContext(CONFIG), TrainerDetector()
    detector.declared_healthy("")
    async with aclosing(detector.watch(context)) as signals:
        context.tell(speaks(silent_s=9.0))
        first = await anext(signals)
        detector.declared_healthy("")
        context.tell(speaks(silent_s=9.0))
        second = await anext(signals)

    assert (first.code, second.code) == (STALLED, STALLED)


@pytest.mark.parametrize(
    ("code", "count", "starved"), [(-9, 4, True), (-9, 3, False), (1, 4, False)]
)
async def test_the_detector_joins_exit_and_count(tmp_path, code, count, starved):
    """Only SIGKILL and a higher count together are out of memory."""
    async with counting(tmp_path) as (context, _, first):
        (tmp_path / "vmstat").write_text(f"oom_kill {count}\n")
        context.tell(ends(code))
        signal = await first

    assert signal.code == (OUT_OF_MEMORY if starved else EXITED)


async def test_an_exit_that_is_forgotten_explains_no_kill(tmp_path):
    """It comes between the exits of two workers that were killed for memory."""
    async with counting(tmp_path) as (context, signals, first):
        (tmp_path / "vmstat").write_text("oom_kill 5\n")
        others = [structs.replace(ends(-9), worker=f"h1/job/{n}.a") for n in (1, 2)]
        for event in (others[0], ends(-9, forgotten=True), others[1]):
            context.tell(event)
        found = [(await first).code, *[(await anext(signals)).code for _ in range(3)]]

    assert found == [OUT_OF_MEMORY, EXITED] * 2


def test_a_missed_checkpoint_is_raised_until_one_succeeds(see):
    """For people: a new host would use the same disk."""
    missed = structs.replace(STATUS, missed=MissedCheckpoint(10, "No space left on device", 1))
    again = structs.replace(STATUS, missed=MissedCheckpoint(20, "No space left on device", 2))
    (signal,) = TrainerFindings(CONFIG).observe(speaks(missed), 0.0)

    assert (signal.code, signal.entity) == (NO_CHECKPOINT, WORKER)
    assert signal.severity is Severity.WARNING
    assert signal.message == "no checkpoint of step 10: No space left on device (1 in a row)"
    assert see(speaks(missed)) == [(NO_CHECKPOINT, State.RAISED)]
    assert see(speaks(again)) == []
    assert see(speaks()) == [(NO_CHECKPOINT, State.CLEARED)]


def test_an_exit_clears_the_missed_checkpoint_of_the_worker(see):
    see(speaks(structs.replace(STATUS, missed=MissedCheckpoint(10, "No space left on device", 1))))

    assert see(ends(0)) == [(NO_CHECKPOINT, State.CLEARED)]


# --- the script -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "code"), [("unregistered", UNREGISTERED), ("rank_kept", RANK_KEPT)]
)
def test_what_a_script_does_wrong_is_for_people_and_ends_with_its_worker(field, code):
    wrong = structs.replace(STATUS, **{field: "train.py:7 is wrong"})
    findings = TrainerFindings(CONFIG)

    (signal,) = findings.observe(speaks(wrong), 0.0)
    (end,) = findings.observe(ends(0), 1.0)

    assert (signal.code, signal.severity) == (code, Severity.WARNING)
    assert signal.message == "train.py:7 is wrong"
    assert (end.code, end.state) == (code, State.CLEARED)


# --- standbys -------------------------------------------------------------------------------------

STANDBY = structs.replace(STATUS, activity=Activity.STANDBY, rank=None)


def test_a_standby_that_is_unfit_is_a_finding_with_its_reason_until_it_rehearses():
    refusal = Rehearsal(step=5, seconds=1.0, refusal="the model differs", ranks=(0, 1, 3))
    unfit = structs.replace(STANDBY, rehearsed=(refusal,))
    fit = structs.replace(STANDBY, rehearsed=(Rehearsal(step=9, seconds=1.0),))
    findings = TrainerFindings(CONFIG)
    raised, *more = findings.observe(speaks(unfit), 0.0)
    (cleared,) = findings.observe(speaks(fit), 1.0)

    assert (raised.code, raised.severity, raised.job) == (UNFIT, Severity.WARNING, "job")
    assert raised.message == "it gets none of ranks 0-1, 3: the model differs"
    assert more == []
    assert (cleared.code, cleared.state) == (UNFIT, State.CLEARED)


def test_a_standby_that_refuses_a_plan_is_a_finding_with_its_reason(see):
    refused = structs.replace(
        STANDBY, activity=Activity.REFUSED, plan="job-2", detail="0.9 s behind at steps of 0.1 s"
    )
    (signal,) = TrainerFindings(CONFIG).observe(speaks(refused), 0.0)

    assert signal.message == "it refused a rank in plan job-2: 0.9 s behind at steps of 0.1 s"
    assert see(speaks(refused)) == [(REFUSED, State.RAISED)]
    assert see(speaks(STANDBY)) == [(REFUSED, State.CLEARED)]


def test_the_exit_of_a_standby_is_distinguished_from_that_of_a_rank():
    def message(status):
        event = structs.replace(ends(1), status=status)
        (signal,) = TrainerFindings(CONFIG).observe(event, 0.0)
        return signal.message

    assert message(STANDBY) == "ended with status 1 as a standby"
    assert message(structs.replace(STATUS, rank=1)) == "ended with status 1"
    assert message(None) == "ended with status 1"

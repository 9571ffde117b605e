"""The end of a job, and what is no end."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests import values
from tests.core.clusters import Scene
from tests.core.test_forming import starting
from tests.core.test_planning import LIMITS, failed, moving, steered
from tmd.core.planning.job_end import dated, given_up, may_be_unlisted
from tmd.core.planning.planning import steer
from tmd.core.values.model import Activity, ClusterView, Exit, JobState, Phase
from tmd.core.values.view_checks import ENDED

# --- a job that has ended -------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(ENDED))
def test_a_job_that_has_ended_is_formed_again_from_where_its_numbers_stopped(
    state: JobState,
) -> None:
    """No epoch is ever proposed twice, and nothing else is done to it."""
    scene = starting(2)
    scene.record = structs.replace(scene.record, state=state, proposed=8, revision=30, ended_at=9.0)
    nobody = steered(scene, failed("h0"), age=1e9)
    for host in scene.ranks:
        scene.says(host, Activity.STARTING)
    again = steered(scene)

    assert nobody is scene.record
    assert (again.state, again.membership.epoch, again.proposed) == (JobState.RUNNING, 9, 9)
    assert (again.revision, again.ended_at) == (31, 0.0)


def test_the_end_of_a_job_gets_a_time() -> None:
    """Also one that an operator wrote, or an earlier release, who give none."""
    scene = Scene(2)
    scene.record = structs.replace(scene.record, state=JobState.FINISHING, revision=7)
    for host in scene.ranks:
        scene.exit(host, 0)
    ended = steered(scene)
    by_hand = given_up(scene.record, "me")
    later = dated(by_hand, 60.0)

    assert (ended.state, ended.ended_at, ended.revision) == (JobState.FINISHED, 50.0, 8)
    assert (by_hand.ended_at, by_hand.revision, by_hand.trained) == (0.0, 8, True)
    assert (later.state, later.ended_at, later.revision) == (JobState.FAILED, 60.0, 9)
    assert dated(later, 70.0) is later


def test_an_ended_job_stays_on_the_list_for_a_while_and_as_long_as_it_has_workers() -> None:
    """A launcher that starts again may become the next run of that name."""
    scene = Scene(2)
    scene.record = structs.replace(scene.record, state=JobState.FINISHED, ended_at=1000.0)
    with_workers = scene.view
    without = ClusterView(jobs=(scene.record,))
    runs = structs.replace(scene.record, state=JobState.RUNNING)
    undated = structs.replace(scene.record, ended_at=0.0)

    assert not may_be_unlisted(scene.record, with_workers, 60.0, 1060.0)
    assert not may_be_unlisted(scene.record, without, 60.0, 1059.0)
    assert not may_be_unlisted(runs, without, 60.0, 1060.0)
    assert not may_be_unlisted(undated, without, 60.0, 1060.0)
    assert may_be_unlisted(scene.record, without, 60.0, 1060.0)


# --- how it ends ---------------------------------------------------------------------------------


def test_a_rank_that_has_finished_ends_the_job_and_drops_its_plan() -> None:
    """Nobody is replaced any more, not even one that is named dead at the same time."""
    scene = moving(Phase.PREPARE)
    scene.exit("h0", 0)
    finishing = steered(scene, failed("h1"))
    scene.record = finishing
    waits = steered(scene, failed("h1"))
    scene.exit("h1", 0)
    finished = steered(scene)

    assert finishing.state is JobState.FINISHING
    assert [p.phase for p in finishing.history] == [Phase.ABORTED]
    assert waits is finishing
    assert finished.state is JobState.FINISHED


def test_a_worker_that_fails_after_the_end_of_training_fails_the_job() -> None:
    scene = Scene(2)
    scene.record = structs.replace(scene.record, state=JobState.FINISHING)
    scene.exit("h0", 0)
    scene.exit("h1", 3)
    after = steered(scene)

    assert after.state is JobState.FAILED
    assert after.detail == f"{values.worker('h1')} failed after the end of training"
    assert after.trained, "its launcher starts it again, and no run follows"


def test_a_worker_whose_launcher_was_stopped_after_the_end_of_training_fails_no_job() -> None:
    """It wrote its last file, and exited with status 0. While the job trains it is lost."""
    scene = Scene(2)
    scene.exits["h1"] = Exit(values.worker("h1"), scene.record.job, -15, 0.0, stopped=True)
    trains = steered(scene)
    scene.record = structs.replace(scene.record, state=JobState.FINISHING)
    scene.exit("h0", 0)

    assert trains.state is JobState.RUNNING
    assert steered(scene).state is JobState.FINISHED


def test_a_job_of_which_no_host_knows_a_worker_has_failed() -> None:
    """Not before the limit, and not while a host is silent: that proves nothing."""
    scene = Scene(2)
    scene.statuses.clear()
    scene.exit("h0", None)
    scene.exit("h1", None)
    known = steered(scene, age=1e9)
    scene.exits = {}
    silent = steered(scene, age=1e9)
    for host in scene.ranks:
        scene.says(host, Activity.TRAINING, job="another")
    early = steered(scene, age=LIMITS.abandon_s - 0.1)
    late = steered(scene, age=LIMITS.abandon_s)

    assert known is silent is early is scene.record
    assert late.state is JobState.FAILED
    assert not late.trained
    assert late.detail.startswith("no worker of the job has been known to its host for 10 s; if it")


def test_an_exit_status_that_nobody_can_report_any_more_ends_the_job() -> None:
    """A host lost power after the end of training, and has returned without its workers."""
    scene = Scene(2)
    scene.exit("h0", 0)
    finishing = scene.record = steered(scene)
    silent = structs.replace(scene.view, hosts=scene.view.hosts[:1])
    still = steered(scene, age=1e9)
    scene.says("h1", Activity.TRAINING, job="another")
    early = steered(scene, age=LIMITS.abandon_s - 0.1)
    late = steered(scene, age=LIMITS.abandon_s)

    assert finishing.state is JobState.FINISHING
    assert steer(scene.record, silent, (), now=1.0, age=1e9, limits=LIMITS) is finishing
    assert still is early is finishing
    assert late.state is JobState.FAILED
    assert late.detail == (
        f"the exit status of {values.worker('h1')} is unknown: no host has known it for 10 s"
    )

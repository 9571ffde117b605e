"""Whether a job would survive the next loss, in a word and a sentence."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.core.clusters import STEP, Scene
from tests.values import member, plan
from tmd.core.planning.survival import LossOutlook, SnapshotAge, survival
from tmd.core.values.checkpoints import SavedCheckpoint
from tmd.core.values.model import Activity, JobState, Phase, Rehearsal, ShadowStatus
from tmd.core.values.requests import DrainRequest
from tmd.core.values.shadows import ShadowAssignment
from tmd.core.values.snapshots import Kept

REHEARSED = (Rehearsal(step=1, seconds=1.0),)


def rehearsed(size=2):
    """Its one standby has rehearsed."""
    scene = Scene(size)
    scene.says("s0", Activity.STANDBY, rehearsed=REHEARSED)
    return scene


def found(scene, **changes):
    return survival(structs.replace(scene.view, **changes), scene.record)


def follows(scene, host, rank, lag_s=0.0, verified=STEP, **more):
    """A hot standby."""
    shadow = ShadowStatus(rank, 1.0, lag_s, verified)
    scene.says(host, Activity.IN_STEP, rehearsed=REHEARSED, shadow=shadow, **more)
    assigned = ShadowAssignment(member(host), rank, stay=True)
    scene.record = structs.replace(scene.record, shadows=(*scene.record.shadows, assigned))


def unique(scene, *steps):
    """The state of each rank exists once; snapshots of ``steps`` are complete."""
    kept = tuple(Kept(rank, step) for step in steps for rank in range(scene.size))
    for rank, host in enumerate(scene.ranks):
        scene.says(
            host,
            Activity.TRAINING,
            rank=rank,
            step=STEP,
            replicas=(rank,),
            kept=kept,
            step_seconds=2.0,
        )


def test_a_job_with_a_rehearsed_standby_survives():
    seen = found(rehearsed())

    assert (seen.outlook, seen.rehearsed) == (LossOutlook.SURVIVES, 1)
    assert seen.sentence == (
        "1 rehearsed standby could take a rank; another worker has the state of every rank"
    )


def test_a_standby_that_has_not_rehearsed_makes_it_likely_only():
    seen = found(Scene(2, standbys=2))

    assert (seen.outlook, seen.rehearsed, seen.unrehearsed) == (LossOutlook.LIKELY, 0, 2)
    assert "2 standbys could take a rank, but none has rehearsed" in seen.sentence


def test_one_rank_that_no_standby_fits_is_enough_to_halt():
    """The sentence names the rank and why each standby does not fit it."""
    scene = Scene(2)
    refused = Rehearsal(step=1, seconds=1.0, refusal="other shapes", ranks=(1,))
    scene.says("s0", Activity.STANDBY, rehearsed=(*REHEARSED, refused))
    seen = found(scene)

    assert seen.outlook is LossOutlook.HALTS
    assert "no standby could take rank 1" in seen.sentence
    assert "other shapes" in seen.sentence


def test_a_rank_that_only_an_unrehearsed_standby_can_take_makes_it_likely_only():
    """Another standby has rehearsed, but not this rank."""
    scene = rehearsed()
    refused = Rehearsal(step=1, seconds=1.0, refusal="other shapes", ranks=(1,))
    scene.says("s0", Activity.STANDBY, rehearsed=(*REHEARSED, refused))
    scene.says("s1", Activity.STANDBY)
    seen = found(scene)

    assert seen.outlook is LossOutlook.LIKELY
    assert "rank 1" in seen.sentence


def test_a_drained_standby_does_not_count():
    assert found(rehearsed(), drains=(DrainRequest("s0", "r"),)).outlook is LossOutlook.HALTS


def test_a_pause_halts_a_job_that_could_survive():
    seen = found(rehearsed(), paused=True)

    assert seen.outlook is LossOutlook.HALTS
    assert "paused" in seen.sentence


def test_a_unique_state_without_a_snapshot_halts():
    scene = rehearsed()
    unique(scene)
    seen = found(scene)

    assert (seen.outlook, seen.snapshot) == (LossOutlook.HALTS, None)
    assert "the state of ranks 0-1 exists only once" in seen.sentence


def test_a_snapshot_says_what_a_loss_repeats():
    """By the newest complete one, in steps and in their time."""
    scene = rehearsed()
    unique(scene, STEP - 5, STEP - 3)
    seen = found(scene)

    assert seen.outlook is LossOutlook.SURVIVES
    assert seen.snapshot == SnapshotAge(step=STEP - 3, behind=3, seconds=6.0)
    assert "repeats 3 steps, 6.0 s" in seen.sentence


def test_a_snapshot_of_which_a_rank_has_the_only_copy_does_not_count():
    """It goes with the rank: each takes its own copy first and sends it then."""
    scene = rehearsed()
    unique(scene, STEP - 5)
    for rank, host in enumerate(scene.ranks):
        status = scene.statuses[host]
        kept = (*status.kept, Kept(rank, STEP - 1))
        scene.statuses[host] = structs.replace(status, kept=kept)
    seen = found(scene)

    assert seen.snapshot is not None
    assert seen.snapshot.step == STEP - 5


def test_a_unique_state_that_a_hot_standby_has_needs_no_snapshot():
    scene = rehearsed()
    unique(scene)
    for rank, name in ((0, "s1"), (1, "s2")):
        follows(scene, name, rank)

    assert found(scene).outlook is LossOutlook.SURVIVES


def test_without_a_heartbeat_of_a_rank_the_answer_is_open():
    scene = rehearsed()
    scene.silent.add("h1")
    seen = found(scene)

    assert seen.outlook is LossOutlook.UNKNOWN
    assert "h1" in seen.sentence


def test_hot_standbys_count_once_their_digests_were_equal():
    """With the largest lag; and the newest checkpoint is named."""
    scene = Scene(3)
    follows(scene, "s0", 0, lag_s=0.1, verified=5, saved=SavedCheckpoint(4, 1.0, "/c"))
    follows(scene, "s1", 1, lag_s=0.3, verified=6)
    follows(scene, "s2", 2, lag_s=0.9, verified=None)
    # A rehearsal, which ends.
    scene.says("s3", Activity.SHADOWING, shadow=ShadowStatus(0, 1.0, 0.7, 6))
    seen = found(scene)

    assert (seen.hot, seen.lag_s, seen.checkpoint) == (2, 0.3, 4)


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.RECOVER])
def test_during_a_plan_the_answer_is_open(phase):
    scene = rehearsed()
    scene.record = structs.replace(
        scene.record, plan=plan(scene.record.membership, phase=phase, id="job-7")
    )
    seen = found(scene)

    assert seen.outlook is LossOutlook.MOVING
    assert "job-7" in seen.sentence


@pytest.mark.parametrize("state", [s for s in JobState if s is not JobState.RUNNING])
def test_a_job_that_does_not_run_replaces_no_rank(state):
    scene = rehearsed()
    scene.record = structs.replace(scene.record, state=state)

    assert found(scene).outlook is LossOutlook.ENDED


def test_a_host_of_another_version_leaves_the_answer_open():
    """Whether it holds a rank or may have standbys."""
    holding = found(rehearsed(), unread=("h0",))
    other = found(Scene(2), unread=("x",))

    assert (holding.outlook, other.outlook) == (LossOutlook.UNKNOWN, LossOutlook.UNKNOWN)
    assert "h0" in holding.sentence
    assert "x may have standbys" in other.sentence

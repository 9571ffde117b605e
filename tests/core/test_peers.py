"""Workers get ranks only if they can communicate with the others of their job."""

from __future__ import annotations

from tests import values
from tests.core.clusters import Scene
from tmd.core.planning.forming import form, why_not_formed
from tmd.core.planning.standby_reasons import shortfall
from tmd.core.planning.standbys import candidates
from tmd.core.values.model import Activity


def starting(size: int) -> Scene:
    scene = Scene(size)
    scene.statuses.clear()
    return scene


def test_a_worker_whose_collectives_another_library_carries_gets_no_rank() -> None:
    """It would wait for the others, and they for it. The reason names it and the remedy."""
    scene = starting(3)
    for host, carrier in [("h0", "own"), ("h1", "nccl 2.29.7"), ("h2", "nccl 2.29.7")]:
        scene.says(host, Activity.STARTING, carrier=carrier, world_size=2)
    enough = form(scene.view, "job")
    scene.says("h2", Activity.STARTING, carrier="nccl 2.27.5", world_size=2)
    why = why_not_formed(scene.view, "job")

    assert enough is not None
    assert [m.host for m in enough.membership.members] == ["h1", "h2"]
    assert form(scene.view, "job") is None
    assert f"worker {values.worker('h0')}: its collectives are carried by own" in why
    assert "set TMD_CUDA to the same value" in why


def test_a_worker_that_does_not_report_what_carries_its_collectives_gets_a_rank() -> None:
    """It has an earlier version of tmd."""
    scene = starting(2)
    scene.says("h0", Activity.STARTING, carrier="nccl 2.29.7")
    scene.says("h1", Activity.STARTING)

    assert form(scene.view, "job") is not None


def test_a_standby_whose_collectives_another_library_carries_gets_no_rank() -> None:
    """It would wait for the others, and they for it. Until members report it nobody differs."""
    scene = Scene(1)
    scene.says("s0", Activity.STANDBY, carrier="own")
    scene.says("s1", Activity.STANDBY, carrier="nccl 2.29.7")
    silent = [m.host for m in candidates(scene.view, scene.record, scene.facts)]
    scene.says("h0", Activity.TRAINING, rank=0, epoch=1, carrier="nccl 2.29.7")
    chosen = [m.host for m in candidates(scene.view, scene.record, scene.facts)]
    why = shortfall((0,), scene.view, scene.record, scene.facts)

    assert silent == ["s0", "s1"]
    assert chosen == ["s1"]
    assert "carried by own, those of the job by nccl 2.29.7: set TMD_CUDA" in why


def test_workers_of_different_releases_never_form_a_job() -> None:
    """They may not understand each other. The job waits, and says whose release differs."""
    scene = starting(3)
    for host, protocol in [("h0", 1), ("h1", 2), ("h2", 2)]:
        scene.says(host, Activity.STARTING, protocol=protocol, world_size=2)
    enough = form(scene.view, "job")
    scene.statuses.clear()
    scene.says("h0", Activity.STARTING, protocol=1, world_size=2)
    scene.says("h1", Activity.STARTING, protocol=2, world_size=2)
    why = why_not_formed(scene.view, "job")

    assert enough is not None
    assert [m.host for m in enough.membership.members] == ["h1", "h2"]
    assert form(scene.view, "job") is None
    assert f"worker {values.worker('h0')}: it uses version 1 of the protocol" in why
    assert "need the same version" in why


def test_a_standby_of_another_release_gets_no_rank() -> None:
    """It could refuse the rank as if its machine computed other bits, or break the step."""
    scene = Scene(1)
    scene.says("h0", Activity.TRAINING, rank=0, epoch=1, protocol=1)
    scene.says("s0", Activity.STANDBY, protocol=2)
    scene.says("s1", Activity.STANDBY, protocol=1)
    chosen = [m.host for m in candidates(scene.view, scene.record, scene.facts)]
    why = shortfall((0,), scene.view, scene.record, scene.facts)

    assert chosen == ["s1"]
    assert "uses version 2 of the protocol between workers, those of the job use version 1" in why
    assert "start this one with the release of tmd that the job has, or the whole job again" in why


def test_a_worker_whose_daemon_does_not_pass_its_version_on_may_get_a_rank() -> None:
    """Daemons of 0.1.0 do not: neither it nor the others may be kept from the job for that."""
    scene = Scene(3)
    for rank, host in enumerate(("h0", "h1", "h2")):
        scene.says(host, Activity.TRAINING, rank=rank, epoch=1, protocol=2 if rank == 0 else 0)
    scene.says("s0", Activity.STANDBY, protocol=2)
    scene.says("s1", Activity.STANDBY, protocol=0)
    scene.says("s2", Activity.STANDBY, protocol=1)

    assert [m.host for m in candidates(scene.view, scene.record, scene.facts)] == ["s0", "s1"]

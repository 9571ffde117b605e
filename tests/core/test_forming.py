"""Which workers get the ranks of a job that begins."""

from __future__ import annotations

from msgspec import structs

from tests.core.clusters import Scene
from tmd.core.planning.forming import form, why_not_formed
from tmd.core.values.model import Activity
from tmd.core.values.requests import DrainRequest


def starting(size: int, *names: str) -> Scene:
    scene = Scene(size)
    scene.statuses.clear()
    for name in names:
        scene.says(name, Activity.STARTING)
    return scene


def test_a_job_is_formed_once_as_many_workers_have_come_as_it_has_ranks() -> None:
    """In the order of their hosts' names; one more stands by."""
    enough = form(starting(2, "h1", "h2", "h0").view, "job")

    assert form(starting(3, "h0", "h1").view, "job") is None
    assert form(starting(2).view, "job") is None
    assert enough is not None
    assert [m.host for m in enough.membership.members] == ["h0", "h1"]
    assert (enough.membership.epoch, enough.proposed, enough.revision) == (1, 1, 1)


def test_a_worker_of_an_earlier_run_with_another_size_does_not_get_in_the_way() -> None:
    """A launcher of it still runs. Whatever number of ranks it had: the job that is whole is
    formed, and otherwise an operator reads why not."""
    scene = starting(3, "h0", "h1")
    for stray in (3, 9):
        for host in ("h0", "h1"):
            scene.says(host, Activity.STARTING, world_size=2)
        scene.says("h2", Activity.STARTING, world_size=stray)
        formed = form(scene.view, "job")
        assert formed is not None
        assert [m.host for m in formed.membership.members] == ["h0", "h1"]
        del scene.statuses["h1"]
        assert form(scene.view, "job") is None

    assert why_not_formed(scene.view, "job") == (
        "the job is not formed: its workers were launched for worlds of 2 ranks (as on h0); "
        "9 ranks (as on h2): stop the launchers of an earlier run, and give all others the same "
        "--nnodes and --nproc-per-node"
    )


def test_a_host_in_reserve_gets_a_rank_of_a_new_job_only_if_there_is_no_other() -> None:
    """The ranks of the chosen hosts are in the order of their names all the same."""
    drains = (DrainRequest("h0", "r", reserve=True),)

    def hosts(*names: str) -> list[str]:
        view = starting(2, *names).view
        active = tuple(structs.replace(host, standby=False) for host in view.hosts)
        formed = form(structs.replace(view, hosts=active, drains=drains), "job")
        return [m.host for m in formed.membership.members] if formed else []

    assert hosts("h0", "h1", "h2") == ["h1", "h2"]
    assert hosts("h0", "h1") == ["h0", "h1"]


def test_no_rank_goes_to_a_standby_host_or_one_that_is_drained() -> None:
    scene = starting(2, "h0", "h1", "s0")
    drained = structs.replace(scene.view, drains=(DrainRequest("h1", "r"),))

    assert form(drained, "job") is None
    assert why_not_formed(drained, "job").startswith(
        "the job is not formed: these hosts are drained: h1"
    )
    assert why_not_formed(scene.view, "job") == ""


def test_a_worker_without_an_address_or_of_another_job_is_not_counted() -> None:
    """Peers could not reach it."""
    scene = starting(2, "h0", "h1")
    scene.says("h1", Activity.STARTING, address="")
    other = starting(2, "h0", "h1")
    other.says("h1", Activity.STARTING, job="another")

    assert form(scene.view, "job") is None
    assert form(other.view, "job") is None


def test_of_two_runs_that_are_complete_none_is_formed() -> None:
    """Nobody can say which one is meant."""
    scene = starting(3, "h0", "h1")
    for host in ("h0", "h1"):
        scene.says(host, Activity.STARTING, world_size=2)
    scene.says("h2", Activity.STARTING, world_size=1)

    assert form(scene.view, "job") is None
    assert "worlds of 1 ranks (as on h2); 2 ranks (as on h0)" in why_not_formed(scene.view, "job")

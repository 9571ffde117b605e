"""Peers that die, hang or abandon the epoch: all others wake up at once, without an exception."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.fabric.circle import Circle, at_once, circle, member, sync
from tests.fabric.pool import pool
from tests.trainer.wire import Facts
from tmd.core.values.errors import LinkError
from tmd.core.values.model import Member, Membership
from tmd.fabric import Fabric, Group

pytestmark = pytest.mark.timeout(60)


def allreduce(c: Circle, fabric: Fabric, *, wait: bool = True) -> bool:
    work = c.of(fabric).allreduce([torch.ones(1000)], sync() if wait else None)
    return work.wait()


def die(fabric: Fabric) -> None:
    """As the kernel does it for a killed process: links are cut and the port is closed."""
    fabric.close(orderly=False)


def test_the_links_of_a_destroyed_group_are_closed_after_its_last_operation() -> None:
    """A thread inside an operation must not meet a descriptor that is another one by now."""
    closed_under: list[bool] = []
    with circle(2) as c:
        c.group()
        c.allreduce()
        fabric, group = c.fabrics[0], c.of(c.fabrics[0])
        assert fabric.standing is not None
        links = [link for key, link in fabric.standing.member_links() if key.group == "0"]
        assert links

        def operation() -> None:
            Facts().until(lambda: all(link.severed for link in links))
            closed_under.append(any(link.sock.fileno() < 0 for link in links))

        group._runner.lane.run(operation, inline=False)
        group.shutdown()
        assert closed_under == [False]
        assert all(link.sock.fileno() < 0 for link in links)


@pytest.mark.parametrize("inline", [True, False])
def test_poison_unblocks_a_wait_for_a_live_peer(inline: bool) -> None:
    with circle(2) as c:
        c.group()
        c.allreduce()
        waits = c.fabrics[0]
        started = threading.Event()
        ended: list[float] = []

        def wait() -> None:
            started.set()
            allreduce(c, waits, wait=inline)
            ended.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        started.wait()
        Facts().until(lambda: waits.waiting)
        at = time.monotonic()
        waits.poison("enough")
        thread.join(5)
        # bench.abort measures it; here it must only be far from any time-out.
        assert ended[0] - at < 2
        assert (waits.poisoned, waits.poison_reason, waits.suspects) == (True, "enough", ())


def test_poison_unblocks_a_wait_for_a_dial() -> None:
    with circle(2) as c:
        c.group()
        high = c.fabrics[1]
        thread = threading.Thread(target=lambda: allreduce(c, high))
        thread.start()
        Facts().until(lambda: high.waiting)
        high.poison("enough")
        thread.join(5)
        assert not thread.is_alive()


def test_a_death_poisons_all_ranks_and_all_suspect_the_dead_worker() -> None:
    with circle(5) as c:
        c.group()
        c.allreduce()
        dead, survivors = c.fabrics[2], [f for f in c.fabrics if f.worker != "w2"]
        threading.Timer(0.05, die, [dead]).start()
        assert c.each(lambda f: allreduce(c, f), survivors) == [True] * 4
        assert [f.suspects for f in survivors] == [("w2",)] * 4


def test_an_abandoned_epoch_spreads_without_suspects() -> None:
    with circle(4) as c:
        c.group()
        c.allreduce()
        others = c.fabrics[1:]
        threading.Timer(0.05, c.fabrics[0].poison, ["operator"]).start()
        assert c.each(lambda f: allreduce(c, f), others) == [True] * 3
        assert [(f.poisoned, f.suspects) for f in others] == [(True, ())] * 3


def test_operations_of_a_poisoned_epoch_return_at_once() -> None:
    with circle(2) as c:
        c.group()
        one = c.fabrics[0]
        one.poison("enough")
        group, tensor = c.of(one), torch.ones(8)
        assert group.allreduce([tensor]).wait()
        assert group.recv([tensor], 1, 0).wait()
        assert group.send([tensor], 1, 0).wait()
        assert group.allreduce([tensor]).get_future().wait()[0] is tensor
        with pytest.raises(LinkError, match="enough"):
            one.reduce_min([1])
        with pytest.raises(LinkError, match="enough"):
            one.shift(b"x", 1)


def test_vote_raises_if_a_voter_dies() -> None:
    with circle(3) as c:
        c.each(lambda f: f.reduce_min([1]))
        threading.Timer(0.05, die, [c.fabrics[2]]).start()

        def vote(fabric: Fabric) -> None:
            with pytest.raises(LinkError):
                fabric.reduce_min([1])

        c.each(vote, c.fabrics[:2])
        assert c.fabrics[0].suspects == ("w2",)


def test_the_first_reason_stays() -> None:
    with circle(2) as c:
        for reason in ("enough", "again"):
            c.fabrics[0].poison(reason)
        assert c.fabrics[0].poison_reason == "enough"


def test_a_receive_whose_sender_died_before_its_first_message_ends() -> None:
    with circle(2) as c:
        c.group()
        work = c.of(c.fabrics[1]).recv([torch.zeros(4)], 0, 0)
        die(c.fabrics[0])
        assert work.wait()
        assert c.fabrics[1].suspects == ("w0",)


def test_a_receive_whose_sender_closed_the_link_ends() -> None:
    with circle(2) as c:
        c.group()
        sender, receiver = c.of(c.fabrics[0]), c.of(c.fabrics[1])
        sender.send([torch.ones(4)], 1, 0).wait()
        receiver.recv([torch.zeros(4)], 0, 0).wait()
        work = receiver.recv([torch.zeros(4)], 0, 0)
        die(c.fabrics[0])
        assert work.wait()
        assert c.fabrics[1].suspects == ("w0",)


def test_a_receive_whose_sender_abandoned_the_epoch_before_its_first_message_ends() -> None:
    with circle(2) as c:
        c.group()
        work = c.of(c.fabrics[1]).recv([torch.zeros(4)], 0, 0)
        c.fabrics[0].poison("operator")
        assert work.wait()
        assert (c.fabrics[1].poisoned, c.fabrics[1].suspects) == (True, ())


def message(c: Circle, value: float) -> float:
    """From rank 0 to rank 1."""
    tensor = torch.zeros(4)
    work = c.of(c.fabrics[1]).recv([tensor], 0, 0)
    c.of(c.fabrics[0]).send([torch.full((4,), value)], 1, 0).wait()
    work.wait()
    return tensor[0].item()


def test_links_lost_in_an_old_epoch_do_not_count_in_the_new_one() -> None:
    with circle(2) as c:
        c.group()
        assert message(c, 1.0) == 1.0
        for fabric in c.fabrics:
            fabric.poison("enough")
        c.membership = c.membership.replaced({}, 2)
        for rank, fabric in enumerate(c.fabrics):
            fabric.enter(c.membership, rank)
        assert message(c, 2.0) == 2.0
        assert not any(f.poisoned for f in c.fabrics)


def test_a_new_group_leaves_the_messages_of_others_alone() -> None:
    with circle(2) as c:
        c.group()
        for i in range(5):
            c.group(f"more{i}")
            assert message(c, float(i)) == float(i)


def recover(c: Circle, rank: int, joiner: Fabric) -> None:
    """Unexpected loss of ``rank``: all enter a new epoch, at their own time."""
    c.fabrics[rank] = joiner
    c.membership = c.membership.replaced({rank: member(joiner)}, c.membership.epoch + 1)


def test_survivors_go_on_with_a_new_member() -> None:
    with circle(4) as c:
        c.group()
        before = c.allreduce(50_000)
        die(c.fabrics[1])
        survivors = [f for f in c.fabrics if f.worker != "w1"]
        c.each(lambda f: allreduce(c, f), survivors)
        joiner = c.standby("joiner")
        recover(c, 1, joiner)
        for rank, fabric in enumerate(c.fabrics):
            fabric.enter(c.membership, rank)
        assert not any(f.poisoned for f in c.fabrics)
        assert torch.equal(before[0], c.allreduce(50_000)[3])


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_delays_but_breaks_nothing(late: int) -> None:
    with circle(2) as c:
        c.group()
        c.fabrics[0].poison("enough")
        new = c.membership.replaced({}, 2)
        early_fabric, late_fabric = c.fabrics[1 - late], c.fabrics[late]
        early_fabric.enter(new, 1 - late)

        def come_late() -> None:
            Facts().until(lambda: early_fabric.waiting)
            late_fabric.enter(new, late)
            allreduce(c, late_fabric)

        at_once([lambda: allreduce(c, early_fabric), come_late])
        assert not early_fabric.poisoned


def test_dialling_a_dead_peer_names_it() -> None:
    with circle(2) as c:
        c.group()
        die(c.fabrics[1])
        assert allreduce(c, c.fabrics[0])
        assert c.fabrics[0].suspects == ("w1",)
        assert "w1" in c.fabrics[0].poison_reason


def test_an_old_epoch_cannot_be_entered_again() -> None:
    with circle(2) as c, pytest.raises(ValueError, match="epoch 1"):
        c.fabrics[0].enter(c.membership, 0)


def worker(rank: int, size: int, pipe: Connection) -> None:
    """A process of its own: all-reduces until stopped, then reports what it observed."""
    torch.set_num_threads(1)
    fabric = Fabric(f"p{rank}", b"k" * 32)
    pipe.send(fabric.address)
    members = tuple(Member(f"p{i}", "here", a) for i, a in enumerate(pipe.recv()))
    fabric.enter(Membership(1, members), rank)
    group = Group(fabric, "0", range(size))
    count = 0
    while not fabric.poisoned:
        group.allreduce([torch.ones(100_000)], sync()).wait()
        count += 1
        if count == 20:
            pipe.send("running")
    pipe.send(fabric.suspects)
    pipe.recv()
    fabric.close()


def test_killed_process_unblocks_the_others() -> None:
    context = mp.get_context("spawn")
    size = 3
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=worker, args=(i, size, pipes[i][1]), daemon=True)
        for i in range(size)
    ]
    try:
        for process in processes:
            process.start()
        addresses = [here.recv() for here, _ in pipes]
        for here, _ in pipes:
            here.send(addresses)
        assert [here.recv() for here, _ in pipes] == ["running"] * size
        os.kill(processes[1].pid or 0, signal.SIGKILL)
        for i in (0, 2):
            assert pipes[i][0].poll(20)
            assert pipes[i][0].recv() == ("p1",)
        for i in (0, 2):
            pipes[i][0].send("done")
            processes[i].join(10)
            assert processes[i].exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join(5)


def alone(rank: int, size: int, store: dist.Store) -> str:
    """Without the runtime there is no vote: an aborted operation must not look like a result."""
    dist.init_process_group("tmd", store=store, rank=rank, world_size=size)
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        return "left"
    try:
        dist.all_reduce(torch.ones(10))
    except LinkError as e:
        return str(e)
    finally:
        dist.destroy_process_group()
    return "no error"


def test_without_the_runtime_an_abort_raises(tmp_path: Path) -> None:
    with pool(2, str(tmp_path / "store")) as p:
        assert "link to solo/1" in p.run(alone)[0]

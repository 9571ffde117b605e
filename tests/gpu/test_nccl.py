"""NCCL as an inner group on a real GPU, which several processes share."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.passing import one_card
from tests.gpu import NEEDS_GPU
from tmd import embedded
from tmd.core.values.model import Member, Membership, PlanKind
from tmd.demo import train
from tmd.demo.cluster import ClusterSpec, LocalCluster, ready, workers
from tmd.demo.report import read_trace
from tmd.demo.story import StoryTimes, event
from tmd.fabric import Fabric, Group
from tmd.fabric.generations.carriers import carry
from tmd.fabric.generations.passing import PassingGroup

pytestmark = [*NEEDS_GPU, pytest.mark.timeout(300)]

KEY = b"k" * 32
SOON_S = 120.0
DEVICE = "cuda:0"


def rank_main(rank: int, size: int, cuda: str, act: Callable[..., Any], pipe: Connection) -> None:
    os.environ.update(one_card(f"rank-{rank}"))
    fabric = Fabric(f"p{rank}", KEY)
    pipe.send(fabric.address)
    members = tuple(Member(f"p{r}", "here", address) for r, address in enumerate(pipe.recv()))
    carry(fabric, {"TMD_CUDA": cuda})
    fabric.enter(Membership(1, members), rank)
    kind = PassingGroup if fabric.generations.kind is not None else Group
    pipe.send(act(fabric, kind(fabric, "0", range(size)), pipe))
    pipe.recv()
    os._exit(0)


class Ranks:
    """Processes that run ``act`` with a fabric and a group each."""

    def __init__(self, processes: list[Any], pipes: list[Connection]) -> None:
        self.processes, self.pipes = processes, pipes

    def received(self, rank: int) -> Any:
        assert self.pipes[rank].poll(SOON_S), f"rank {rank} says nothing"
        return self.pipes[rank].recv()


@contextmanager
def ranks(size: int, act: Callable[..., Any], cuda: str = "nccl") -> Iterator[Ranks]:
    spawn = mp.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(size)]
    processes = [
        spawn.Process(target=rank_main, args=(r, size, cuda, act, pipes[r][1]), daemon=True)
        for r in range(size)
    ]
    try:
        for process in processes:
            process.start()
        made = Ranks(processes, [here for here, _ in pipes])
        addresses = [made.received(r) for r in range(size)]
        for pipe in made.pipes:
            pipe.send(addresses)
        yield made
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def summed(fabric: Fabric, group: Group, _: Connection) -> list[float]:
    """By a future, as DDP waits for it."""
    tensor = torch.full((4,), float(2 ** (fabric.rank or 0)), device=DEVICE)
    (found,) = group.allreduce([tensor]).get_future().wait()
    fabric.settle()
    values: list[float] = found.cpu().tolist()
    return values


@pytest.mark.parametrize("cuda", ["nccl", "staged"])
def test_ranks_on_one_card_sum(cuda: str) -> None:
    with ranks(3, summed, cuda) as made:
        assert [made.received(r) for r in range(3)] == [[7.0] * 4] * 3


def until_poisoned(fabric: Fabric, group: Group, pipe: Connection) -> tuple[Any, Any]:
    fabric.reduce_min([1])
    group.allreduce([torch.ones(1 << 20, device=DEVICE)]).wait()
    fabric.settle()
    pipe.send("running")
    while not fabric.poisoned:
        group.allreduce([torch.ones(1 << 20, device=DEVICE)]).wait()
        fabric.settle()
    return fabric.suspects, fabric.generations.await_aborts(SOON_S)


def test_a_killed_rank_frees_the_others_from_their_device() -> None:
    """Its peers are inside collectives of NCCL, which would never end."""
    with ranks(4, until_poisoned) as made:
        assert [made.received(r) for r in range(4)] == ["running"] * 4
        os.kill(made.processes[1].pid, signal.SIGKILL)
        assert [made.received(r) for r in (0, 2, 3)] == [(("p1",), ())] * 3


def job(folder: Path, url: str, standby: tuple[str, ...]) -> ClusterSpec:
    hosts = ("h1", "h2", "h3")
    return ClusterSpec(
        folder,
        url,
        "small",
        hosts,
        standby,
        (train.__file__, "--device", DEVICE, "--steps", "300"),
        max_restarts=1,
        environment={"TMD_CUDA": "nccl"},
        own_environment={host: one_card(host) for host in (*hosts, *standby)},
    )


async def test_a_drain_and_a_loss_keep_the_numbers(tmp_path: Path) -> None:
    """The demo's job on the card: the losses are those of an undisturbed run, bit for bit."""
    with embedded.redis() as server:
        async with LocalCluster(job(tmp_path / "undisturbed", server.url, ())) as cluster:
            assert set((await cluster.finished(SOON_S)).values()) == {0}
            golden = read_trace(cluster.trace)
    times = StoryTimes()
    with embedded.redis() as server:
        async with LocalCluster(job(tmp_path / "disturbed", server.url, ("s1",))) as cluster:
            await event(cluster, times, lambda: cluster.drain("h2", soft=True))
            view = await cluster.until(lambda v: ready(v, 3, 1), "the drained host stands by")
            victim = next(w for w in workers(view) if w.rank == 2)
            await event(cluster, times, lambda: os.kill(victim.pid, signal.SIGKILL))
            await cluster.finished(SOON_S)
            trace = read_trace(cluster.trace)

    assert [plan.kind for plan in times.plans] == [PlanKind.PLANNED, PlanKind.FAILOVER]
    assert trace.commits.keys() == golden.commits.keys()
    assert all(trace.commits[k]["loss"] == line["loss"] for k, line in golden.commits.items())

"""A worker that has adopted ranks computes each step once for every rank that it holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from tests.fabric.circle import PATIENCE, Circle, circle
from tests.trainer.scripts import mlp, normed
from tests.trainer.standalone import Voting
from tmd.core.values.model import WorkerStatus
from tmd.fabric import Fabric
from tmd.fabric.dependent_sums import WAITED
from tmd.trainer import Session, StepResult
from tmd.trainer.session.elastic import obstacle
from tmd.trainer.session.trace import Trace
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.placing import undivided
from tmd.trainer.state.replicas import all_alike, all_different
from tmd.trainer.state.state import Registry
from tmd.trainer.worker.adopted_ranks import AdoptedRanks

SIZE = 4
SAMPLES = 32
PARTIAL, COMMITTED, SPOILT = StepResult.PARTIAL, StepResult.COMMITTED, StepResult.SPOILT


class Held:
    """Stands for the fabric of a worker that holds several ranks."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = tuple(sorted(ranks, reverse=True))
        self.acting = min(ranks)
        self.breaks: set[int] = set()
        """Ranks whose next pass breaks."""
        self.why = ""

    def allow(self, obstacle: str) -> None:
        self.why = obstacle

    def refuse(self, why: str) -> None:
        self.why = self.why or why

    def draw_for(self, rank: int) -> None:
        self.acting = rank

    def begin_pass(self, rank: int, *, first: bool, last: bool) -> None:
        self.acting = rank

    def leave_step(self) -> None:
        self.acting = min(self.ranks)

    def end_pass(self) -> bool:
        broke = self.acting in self.breaks
        self.breaks.discard(self.acting)
        return not broke


class Adopting(Voting):
    """Of the worker of rank 2, which has adopted others."""

    def __init__(self, *adopted: int) -> None:
        super().__init__()
        self._status = structs.replace(self._status, rank=2, world_size=SIZE)
        self.held = self.adoption = Held(2, *adopted)  # type: ignore[assignment]

    @property
    def rank(self) -> int:
        return self.held.acting

    def seeds(self, own: int) -> tuple[int, ...]:
        return tuple(range(100, 100 + SIZE))


class Job:
    """A script that notes what it computes."""

    def __init__(self, hooks: Voting, trace: Trace | None = None) -> None:
        self.hooks = hooks
        self.session = Session(hooks, trace)
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = SGD(self.model.parameters(), lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.session.register(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            **self.registered(),
        )
        self.seen: list[tuple[int, StepResult | None, list[float], float]] = []
        """Rank, result, batch and a random number of each pass."""

    def registered(self) -> dict[str, Any]:
        """What else is registered."""
        return {}

    def behind(self) -> None:
        """Runs behind the block of each step."""

    def run(self, loader: Any, steps: int) -> None:
        for (batch,) in self.session.batches(loader):
            rank, drawn = self.session.rank, float(torch.rand(()))
            self.at = self.session.step_number
            with self.session.step() as step:
                self.optimizer.zero_grad()
                loss = self.model(batch[:, None]).sum()
                step.record(loss)
                loss.backward()
                self.optimizer.step()
            self.scheduler.step()
            self.behind()
            self.seen.append((rank, step.result, batch.tolist(), drawn))
            if step.counts and self.session.step_number == steps:
                break


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


def loader() -> DataLoader[Any]:
    data = TensorDataset(torch.arange(SAMPLES).float())
    sampler = DistributedSampler(data, SIZE, 0, seed=3)
    return DataLoader(data, batch_size=2, sampler=sampler)


def alone(rank: int, steps: int) -> list[tuple[list[float], float]]:
    """Batches and random numbers of a rank that holds only itself."""
    hooks = Adopting()
    hooks._status = structs.replace(hooks._status, rank=rank)
    hooks.held.ranks, hooks.held.acting = (rank,), rank
    job = Job(hooks)
    job.run(loader(), steps)
    return [(batch, drawn) for _, _, batch, drawn in job.seen]


def test_each_step_runs_once_for_each_rank_with_its_batch_and_its_random_numbers() -> None:
    """The last pass is that of the lowest rank, and it alone votes and applies."""
    hooks = Adopting(0, 3)
    job = Job(hooks)
    job.run(loader(), 3)

    assert [(rank, result) for rank, result, _, _ in job.seen] == [
        (3, PARTIAL),
        (2, PARTIAL),
        (0, COMMITTED),
    ] * 3
    for rank in (0, 2, 3):
        assert [(b, d) for r, _, b, d in job.seen if r == rank] == alone(rank, 3)
    assert hooks.seen == ["vote", "apply"] * 3


def test_a_pass_leaves_no_trace() -> None:
    """Not even by code after its block: the scheduler has made as many steps as the optimizer."""
    job, same = Job(Adopting(3)), Job(Adopting())
    job.run(loader(), 2)
    same.run(loader(), 2)

    assert job.optimizer.param_groups[0]["lr"] == same.optimizer.param_groups[0]["lr"] == 0.25
    assert torch.equal(job.model.weight, same.model.weight)


def test_behind_the_loop_a_script_sees_its_lowest_rank() -> None:
    """Scripts save there if their rank is 0."""
    job = Job(Adopting(0))
    job.run(loader(), steps=SAMPLES)

    assert job.seen
    assert job.session.rank == 0


def test_behind_a_loop_that_it_breaks_off_a_script_sees_its_lowest_rank() -> None:
    """At the top of the body the first pass has begun, which is that of another rank."""
    job = Job(Adopting(0))
    for (batch,) in job.session.batches(loader()):
        if job.session.position.index == 1:
            seen = job.session.rank
            break
        with job.session.step():
            job.model(batch[:, None]).sum().backward()
            job.optimizer.step()

    assert (seen, job.session.rank) == (2, 0)


class Averaging(Job):
    """Updates an average behind the block, from a step on."""

    def __init__(self, hooks: Voting, since: int) -> None:
        super().__init__(hooks)
        self._since = since

    def registered(self) -> dict[str, Any]:
        self.average = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.average.weight)
        return {"ema": self.average}

    def behind(self) -> None:
        if self.at >= self._since:
            with torch.no_grad():
                self.average.weight.mul_(0.5)


@pytest.mark.parametrize("since", [0, 2])
@pytest.mark.parametrize("lost", [False, True])
def test_a_pass_moves_no_average(since: int, lost: bool) -> None:
    """Whether or not it is known that it moves: it may begin to in this step, or a loss may have
    broken the only step before."""
    hooks = Adopting(0, 3)
    hooks.lost = {0} if lost else set()
    job, same = Averaging(hooks, since), Averaging(Adopting(), since)
    job.run(loader(), 4)
    same.run(loader(), 4)

    assert torch.equal(job.average.weight, same.average.weight)
    assert float(same.average.weight.detach()) < 1


@pytest.mark.parametrize("where", ["first pass", "vote"])
def test_a_break_repeats_all_passes(where: str) -> None:
    """With the same batches."""
    hooks = Adopting(1, 3)
    if where == "vote":
        hooks.lost = {0}
    else:
        hooks.held.breaks = {3}
    job = Job(hooks)
    job.run(loader(), 1)
    passes = [(3, SPOILT)] if where != "vote" else [(3, PARTIAL), (2, PARTIAL), (1, SPOILT)]
    whole = [(3, PARTIAL), (2, PARTIAL), (1, COMMITTED)]

    assert [(rank, result) for rank, result, _, _ in job.seen] == [*passes, *whole]
    again = job.seen[len(passes) :]
    assert [seen[2:] for seen in job.seen[: len(passes)]] == [
        seen[2:] for seen in again[: len(passes)]
    ]


def test_a_rank_that_is_adopted_within_an_epoch_goes_on_where_it_was() -> None:
    hooks = Adopting()
    job = Job(hooks)
    batches = iter(job.session.batches(loader()))
    seen: list[tuple[int, list[float]]] = []

    def step() -> None:
        (batch,) = next(batches)
        with job.session.step():
            job.optimizer.zero_grad()
            job.model(batch[:, None]).sum().backward()
            job.optimizer.step()
        seen.append((job.session.rank, batch.tolist()))

    step()
    hooks.held.ranks = (3, 2)
    step(), step()
    hooks.held.ranks, hooks.held.acting = (2,), 2
    step()
    batches_of = {rank: [batch for batch, _ in alone(rank, 3)] for rank in (2, 3)}
    own, adopted = batches_of[2], batches_of[3]

    assert seen == [(2, own[0]), (3, adopted[1]), (2, own[1]), (2, own[2])]


class Lines(Trace):
    def __init__(self) -> None:
        self.losses: list[dict[int, float | None]] = []

    def write(
        self, current: Callable[[], WorkerStatus], losses: Mapping[int, float | None]
    ) -> None:
        self.losses.append(dict(losses))


def test_the_trace_has_the_loss_of_each_rank() -> None:
    """Of a step that broke, only those of its repeat."""
    hooks, trace = Adopting(3), Lines()
    hooks.lost = {0}
    Job(hooks, trace).run(loader(), 2)

    assert [list(losses) for losses in trace.losses] == [[3, 2], [3, 2]]
    assert trace.losses[0] == {3: 0.0, 2: 0.0}
    assert all(loss is not None and loss != 0.0 for loss in trace.losses[1].values())


# --- what is refused ------------------------------------------------------------------------------


class Stream(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        yield 1.0


DATA = TensorDataset(torch.zeros(4))
LOADERS: list[tuple[Any, str]] = [
    (lambda place: [1.0], ""),
    ([1.0], ""),
    (DataLoader(DATA), ""),
    (DataLoader(DATA, shuffle=True), ""),
    (iter([1.0]), "its batches come from a list_iterator"),
    (DataLoader(Stream()), "its data set is an IterableDataset"),
    (DataLoader(DATA, num_workers=1, persistent_workers=True), "persistent_workers"),
    (DataLoader(DATA, shuffle=True, generator=torch.Generator()), "a generator of its own"),
    (DataLoader(DATA, sampler=RandomSampler(DATA, generator=torch.Generator())), "a generator"),
]


@pytest.mark.parametrize(("given", "why"), LOADERS)
def test_which_loaders_give_the_batches_of_several_ranks(given: Any, why: str) -> None:
    found = undivided(given)
    assert (why in found) if why else found == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"size": 1}, "it has one rank"),
        ({"built": True}, "it uses session.build()"),
        ({"alike": all_different(SIZE)}, "the state of some ranks exists once"),
        ({}, "its model is not wrapped in DistributedDataParallel"),
        ({"models": []}, ""),
        ({"models": [], "snapshots": 5}, "it takes snapshots"),
        ({"models": [], "local": normed()}, "buffers that steps change, such as BatchNorm's"),
    ],
)
def test_which_registered_objects_forbid_it(changes: dict[str, Any], why: str) -> None:
    module = changes.pop("local", None) or mlp()
    optimizer = SGD(module.parameters(), lr=0.1)
    local = LocalState(Registry({"model": module, "optimizer": optimizer}))
    usual = {"models": [module], "alike": all_alike(SIZE), "size": SIZE}
    options = {**usual, "snapshots": 0, "built": False, "local": local, **changes}
    found = obstacle(**options)
    assert (why in found) if why else found == ""


def test_a_static_graph_of_ddp_forbids_it() -> None:
    """Only the first pass of a worker would reduce which parameters are used."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(mlp(), static_graph=True)
        local = LocalState(Registry({"model": model, "optimizer": SGD(model.parameters(), lr=0.1)}))
        found = obstacle([model], all_alike(SIZE), local, size=SIZE, snapshots=0, built=False)
    finally:
        dist.destroy_process_group()

    assert "static_graph" in found


def test_what_a_session_cannot_share_is_noted_when_its_loop_begins() -> None:
    hooks = Adopting()
    job = Job(hooks)
    job.session.repeatable(lambda: None, name="evaluate")
    next(iter(job.session.batches(loader())))
    assert hooks.held.why == "it uses session.repeatable()"


def test_a_script_that_does_not_ask_is_not_asked() -> None:
    hooks = Adopting()
    job = Job(hooks)
    assert hooks.held.why == ""
    other = Session(hooks)
    other.register(model=job.model, optimizer=job.optimizer, elastic=True)
    assert hooks.held.why != ""


def test_steps_with_unequal_passes_abandon_the_epoch_before_the_vote() -> None:
    """And the worker says why it cannot adopt ranks any more."""
    with last_pass(mlp()) as (jobs, ranks, local):
        adopter = jobs.fabrics[0]
        ranks.come_to_vote(local)

        assert adopter.poisoned
        assert adopter.passes.inelastic is not None
        assert "fewer operations" in adopter.passes.inelastic


def test_a_pass_in_the_middle_may_not_call_fewer_operations_either() -> None:
    """Its rank is lacking in a sum, though the first pass and the last one agree."""
    with circle(3) as jobs:
        jobs.group()
        adopter = jobs.fabrics[0]
        _shrink(adopter, jobs.membership.replaced({}, 2).shrunk({1: 0, 2: 0}))
        ranks = AdoptedRanks(adopter)
        ranks.allow("")
        goes_on = []
        for rank in (2, 1):
            ranks.begin_pass(rank, first=rank == 2, last=False)
            ranks.begun()
            if rank == 2:
                jobs.of(adopter).allreduce([torch.ones(1)]).wait()
            goes_on.append(ranks.end_pass())

        assert goes_on == [True, False]
        assert "fewer operations" in (adopter.passes.inelastic or "")


def test_another_loss_says_nothing_about_the_script() -> None:
    """Operations of a poisoned epoch end before they are counted."""
    with last_pass(mlp()) as (jobs, ranks, local):
        adopter = jobs.fabrics[0]
        adopter.poison("a link broke")
        ranks.come_to_vote(local)

        assert adopter.passes.inelastic == ""


def test_a_step_that_uses_a_sum_before_another_one_breaks() -> None:
    """The pass before the last has used its own input: no vote would show it."""
    with last_pass(mlp()) as (jobs, ranks, local):
        adopter = jobs.fabrics[0]
        ranks.leave_step()
        for rank in (1, 0):
            ranks.begin_pass(rank, first=rank == 1, last=rank == 0)
            ranks.begun()
            tokens = torch.ones(1)
            jobs.of(adopter).allreduce([tokens]).wait()
            jobs.of(adopter).allreduce([torch.ones(1) / tokens]).wait()
            if rank == 1:
                assert ranks.end_pass()
        ranks.come_to_vote(local)

        assert adopter.poisoned
        assert adopter.passes.inelastic == WAITED


@contextmanager
def last_pass(module: nn.Module) -> Iterator[tuple[Circle, AdoptedRanks, LocalState]]:
    """The worker of rank 0 has adopted rank 1, and its last pass runs."""
    with circle(2) as jobs:
        jobs.group()
        adopter = jobs.fabrics[0]
        _shrink(adopter, jobs.membership.replaced({}, 2).shrunk({1: 0}))
        ranks = AdoptedRanks(adopter)
        ranks.allow("")
        local = LocalState(Registry({"model": module, "optimizer": SGD(module.parameters(), 0.1)}))
        for rank in (1, 0):
            ranks.begin_pass(rank, first=rank == 1, last=rank == 0)
            ranks.begun()
            local.begin()
            if rank == 1:
                jobs.of(adopter).allreduce([torch.ones(1)]).wait()
                assert ranks.end_pass()
        yield jobs, ranks, local


def test_an_operation_that_is_not_waited_for_belongs_to_its_step() -> None:
    """The vote waits for it: it has yet to run, and would else count as missing."""
    with last_pass(mlp()) as (jobs, ranks, local):
        adopter, let_go = jobs.fabrics[0], threading.Event()
        group = jobs.of(adopter)

        def occupy() -> None:
            let_go.wait(PATIENCE)

        group._runner.lane.run(occupy, inline=False)
        work = group.allreduce([torch.ones(1)], asynchronous())
        vote = threading.Thread(target=ranks.come_to_vote, args=(local,))
        vote.start()
        let_go.set()
        vote.join(PATIENCE)

        assert work.is_completed()
        assert not adopter.poisoned


def test_a_buffer_that_begins_to_change_breaks_the_step() -> None:
    """What the passes of other ranks have made of it is lost."""
    module, seen = mlp(), torch.zeros(1)
    module.register_buffer("seen", seen)
    with last_pass(module) as (jobs, ranks, local):
        adopter = jobs.fabrics[0]
        jobs.of(adopter).allreduce([torch.ones(1)]).wait()
        seen += 1
        ranks.come_to_vote(local)

        assert adopter.poisoned
        assert "buffers that steps change" in (adopter.passes.inelastic or "")


def asynchronous() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.asyncOp = True
    return options


def _shrink(fabric: Fabric, membership: Any) -> None:
    fabric.enter(membership, membership.rank_of(fabric.worker))


def test_groups_that_are_not_of_all_ranks_forbid_it() -> None:
    with circle(3) as jobs:
        jobs.group()
        jobs.group("half", (0, 1))
        first, _, last = (AdoptedRanks(fabric) for fabric in jobs.fabrics)
        first.allow("")
        last.allow("")
        reasons = [fabric.passes.inelastic for fabric in jobs.fabrics]

        assert reasons == ["group half has not all ranks", None, ""]

"""A step that a loss has broken is left at the next module, and training goes on as without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.torch_private.hooks import BACKWARD_HOOKS
from tests.trainer.standalone import Voting
from tmd.trainer import Session, StepResult
from tmd.trainer.protocol.step_vote import VoteKind
from tmd.trainer.session.early_exit import left_early
from tmd.trainer.session.hooks import Interrupted, VoteOutcome
from tmd.trainer.state.local import LocalState

LAYERS = 4
Passes = list[tuple[str, int]]
SECOND = 1
"""The step that breaks in most tests."""


class Hooks(Voting):
    """The repetition of a broken step is whole."""

    def boundary(self) -> bool:
        self.health.broken = False
        return super().boundary()


class BreaksLate(Hooks):
    """A rank is lost just after each vote: the step is committed."""

    def vote(self, local: LocalState, kind: VoteKind = VoteKind.STEPPING) -> VoteOutcome:
        outcome = super().vote(local, kind)
        self.health.broken = True
        return outcome


class Layer(nn.Module):
    """Notes when it computes and when a gradient comes."""

    def __init__(self, number: int, note: Callable[[str, int], None]) -> None:
        super().__init__()
        self._number, self._note = number, note
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self._note("forward", self._number)
        out: Tensor = self.inner(x)
        if out.requires_grad:
            out.register_hook(self._got)
        return out.tanh()

    def _got(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._note("backward", self._number)


class Stack(nn.Module):
    def __init__(self, note: Callable[[str, int], None], *, again: bool) -> None:
        """``again``: the layers compute once more in the backward pass."""
        super().__init__()
        self._again = again
        self.layers = nn.ModuleList(Layer(number, note) for number in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self._again else layer(x)
        return x


class Job:
    """Trains five steps, one of which breaks in the pass ``at``."""

    def __init__(
        self,
        at: tuple[str, int] | None = None,
        *,
        ddp: bool = True,
        again: bool = False,
        early: bool = True,
        breaks: int = SECOND,
        hooks: Hooks | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.passes: Passes = []
        """Those of the step that breaks, the first time."""
        self.results: list[StepResult | None] = []
        self._at, self._breaks, self._hooks = at, breaks, hooks or Hooks()
        self._session = Session(self._hooks)
        stack = Stack(self._note, again=again)
        model = DistributedDataParallel(stack, bucket_cap_mb=0.0001) if ddp else stack
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        self._session.register(model=model, optimizer=optimizer)
        draw = torch.Generator().manual_seed(1)
        batches = [torch.randn(2, 4, generator=draw) for _ in range(5)]
        for batch in self._session.batches(batches, leave_early=early):
            with self._session.step() as step:
                optimizer.zero_grad()
                model(batch).square().sum().backward()
                optimizer.step()
                model(batch)
            self.results.append(step.result)
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]

    def _note(self, way: str, number: int) -> None:
        if len(self.results) != self._breaks:
            return
        self.passes.append((way, number))
        if (way, number) == self._at and self.passes.count(self._at) == 1:
            self._hooks.health.broken = True

    def ends_like(self, other: Job) -> bool:
        return all(map(torch.equal, self.weights, other.weights))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WHOLE = [("forward", n) for n in range(LAYERS)] + [("backward", n) for n in reversed(range(LAYERS))]


def broken_once(breaks: int) -> list[StepResult]:
    """The results of five steps of which the one numbered ``breaks`` breaks once."""
    committed = [StepResult.COMMITTED] * 5
    return [*committed[:breaks], StepResult.SPOILT, *committed[breaks:]]


ONCE = broken_once(SECOND)


@pytest.mark.parametrize("breaks", [0, SECOND])
@pytest.mark.parametrize("ddp", [True, False])
@pytest.mark.parametrize("at", [("forward", 1), ("backward", 2), ("backward", 0)])
def test_no_module_computes_after_the_loss(at: tuple[str, int], ddp: bool, breaks: int) -> None:
    """Forward as well as backward; the weights are those of an undisturbed job, bit for bit."""
    job = Job(at, ddp=ddp, breaks=breaks)

    assert job.passes == WHOLE[: WHOLE.index(at) + 1]
    assert job.results == broken_once(breaks)
    assert job.ends_like(Job(ddp=ddp))


@pytest.mark.parametrize("ddp", [True, False])
def test_a_forward_pass_inside_of_a_backward_pass_is_not_broken_off(ddp: bool) -> None:
    """DDP would count on the gradients of the layers below."""
    job = Job(("backward", 2), ddp=ddp, again=True)

    assert job.results == ONCE
    assert ("backward", 1) not in job.passes
    assert job.ends_like(Job(ddp=ddp, again=True))


def test_after_the_vote_nothing_is_left() -> None:
    job = Job(hooks=BreaksLate())

    assert job.results == [StepResult.COMMITTED] * 5
    assert job.ends_like(Job())


def test_modules_in_other_threads_are_not_left() -> None:
    """Such as transforms of data in a thread that reads ahead."""
    for _ in left_early(iter([1]), lambda: True):
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(nn.Identity(), torch.ones(1)).result()
        with pytest.raises(Interrupted):
            nn.Identity()(found)

    assert torch.equal(nn.Identity()(found), torch.ones(1))


def test_by_default_a_broken_step_is_computed_to_its_end() -> None:
    job = Job(("forward", 1), early=False)

    assert job.passes == WHOLE
    assert job.results == ONCE


def accumulated(breaks_in: int | None) -> tuple[list[StepResult | None], list[Tensor]]:
    """Train with two batches a step, the first without communication, and with a BatchNorm; a step
    breaks after the forward pass of one of its batches. The results, and the state at the end."""
    torch.manual_seed(0)
    hooks, results = Hooks(), list[StepResult | None]()
    session = Session(hooks)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model = DistributedDataParallel(net, bucket_cap_mb=0.0001)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.register(model=model, optimizer=optimizer)
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(3, 4, generator=draw) for _ in range(10)]
    for pair in session.batches(batches, accumulate=2, leave_early=True):
        with session.step() as step:
            optimizer.zero_grad()
            for number, batch in enumerate(pair):
                with model.no_sync() if number == 0 else nullcontext():
                    out = model(batch)
                    if len(results) == SECOND and number == breaks_in:
                        hooks.health.broken = True
                    out.square().sum().backward()
            optimizer.step()
        results.append(step.result)
    return results, [*net.parameters(), *net.buffers()]


@pytest.mark.parametrize("breaks_in", [0, 1])
def test_accumulated_gradients_and_buffers_are_those_of_an_undisturbed_job(breaks_in: int) -> None:
    results, state = accumulated(breaks_in)
    _, undisturbed = accumulated(None)

    assert results == ONCE
    assert all(map(torch.equal, state, undisturbed))


def test_a_compiled_model_trains_on() -> None:
    """Its code has no hooks: a backward pass of it runs with zeros."""
    hooks, stack = Hooks(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    session, run = Session(hooks), torch.compile(stack, backend="aot_eager")
    optimizer = SGD(stack.parameters(), lr=0.1)
    session.register(model=stack, optimizer=optimizer)
    results = []
    for batch in session.batches([torch.ones(1, 4)] * 5, leave_early=True):
        with session.step() as step:
            out = run(batch)
            hooks.health.broken = len(results) == SECOND
            out.sum().backward()
            optimizer.step()
        results.append(step.result)

    assert results == ONCE


def test_a_static_graph_is_refused() -> None:
    """A gradient that is missing in its first backward pass counts as unused from then on."""
    model, session = DistributedDataParallel(nn.Linear(2, 2), static_graph=True), Session(Hooks())
    session.register(model=model, optimizer=SGD(model.parameters(), lr=0.1))

    with pytest.raises(ValueError, match="leave_early=True does not support static_graph of DDP"):
        session.batches([1.0], leave_early=True)


def test_fsdp2_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    model, session = nn.Linear(2, 2), Session(Hooks())
    sharded: object = fully_shard(model)
    assert isinstance(sharded, nn.Module)
    session.register(model=sharded, optimizer=SGD(sharded.parameters(), lr=0.1))

    with pytest.raises(ValueError, match="leave_early=True does not support FSDP2"):
        session.batches([1.0], leave_early=True)


@pytest.mark.parametrize("hook", BACKWARD_HOOKS)
def test_backward_hooks_are_refused(hook: Callable[[nn.Linear], object]) -> None:
    """One that fails without a gradient would break off the backward pass, and DDP with it."""
    model, session = nn.Linear(2, 2), Session(Hooks())
    hook(model)
    session.register(model=[model], optimizer=SGD(model.parameters(), lr=0.1))

    with pytest.raises(ValueError, match="does not support backward hooks"):
        session.batches([1.0], leave_early=True)


def test_a_step_without_a_block_is_refused() -> None:
    """Between its parts nothing would swallow the exception."""
    model, session = nn.Linear(2, 2), Session(Hooks())
    session.register(model=model, optimizer=SGD(model.parameters(), lr=0.1))

    for _ in session.batches([1.0], leave_early=True):
        with pytest.raises(RuntimeError, match=r"needs session.step\(\), not session.begin"):
            session.begin()
        break


def test_what_a_function_builds_is_refused() -> None:
    """It may be a stage of a pipeline, whose schedule keeps losses."""
    session, model = Session(Hooks()), nn.Linear(2, 2)

    def build(session: Session) -> None:
        session.register(model=model, optimizer=SGD(model.parameters(), lr=0.1))

    session.build(build)
    with pytest.raises(ValueError, match=r"does not support session.build\(\)"):
        session.batches([1.0], leave_early=True)

"""The session without a daemon: steps, closures, counters, and what a wrong script is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from tests.trainer.standalone import Script, Voting
from tests.twin.device import Twin
from tmd.trainer import DataPlace, Session, StepResult
from tmd.trainer.session.hooks import Interrupted
from tmd.trainer.session.optimizers import OptimizerHooks, Stage
from tmd.trainer.session.standalone import StandaloneHooks
from tmd.trainer.state.data import Feed
from tmd.trainer.state.local import LocalState
from tmd.trainer.worker.join import _end_as_lost


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.mark.parametrize("named", [False, True])
def test_the_vote_comes_after_the_backward_of_a_closure(named: bool, script: Script) -> None:
    """By position or by name; the closure runs once, and its loss is what step() returns."""
    (optimizer,) = script.optimizers
    losses: list[float] = []
    for batch in script.session.batches([2.0, 3.0]):
        with script.session.step() as step, torch.no_grad():
            closure = script.closure(batch)
            loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
            losses.append(float(loss))
        assert step.counts

    assert script.hooks.seen == ["backward", "vote", "apply"] * 2
    assert losses == [0.0, -6.0]
    assert script.weight == -5.0


def test_a_step_without_a_block_ends_as_committed_or_as_spoilt(script: Script) -> None:
    """A loop that runs on after a lost rank meets no exception, and computes nothing more."""
    script.hooks.lost = {1}
    results, after = [], []
    for batch in script.session.batches([2.0, 3.0]):
        step = script.session.begin()
        loss = step.run(script.optimizers[0].step, script.closure(batch))
        after.append(step.run(lambda: "computed"))
        results.append((batch, step.end(loss)))

    committed, spoilt = StepResult.COMMITTED, StepResult.SPOILT
    assert results == [(2.0, committed), (3.0, spoilt), (3.0, committed)]
    assert after == ["computed", None, "computed"]
    assert script.weight == -5.0


def test_an_error_of_the_script_is_raised_out_of_its_part(script: Script) -> None:
    def fail() -> None:
        raise KeyError("mistake")

    for _ in script.session.batches([1.0]):
        with pytest.raises(KeyError, match="mistake"):
            script.session.begin().run(fail)
        break


def test_a_step_whose_second_closure_fails_never_counts() -> None:
    """The first optimizer has run."""
    script = Script(optimizers=2)

    def fail() -> Tensor:
        raise ValueError("mistake")

    def take_step() -> None:
        with script.session.step():
            script.optimizers[0].step(script.closure(1.0))
            with suppress(ValueError):
                script.optimizers[1].step(fail)

    for _ in script.session.batches([1.0]):
        with pytest.raises(RuntimeError, match="SGD has failed in a step on whose update"):
            take_step()
        break


@pytest.mark.parametrize(("error", "status"), [(ValueError, 1), (SystemExit, 0)])
@pytest.mark.parametrize("in_block", [True, False])
def test_a_process_that_has_failed_in_a_step_ends_with_status_1(
    error: type[BaseException], status: int, in_block: bool, script: Script
) -> None:
    """Its script may have caught the error. What ends a process has a status of its own."""

    def fail() -> None:
        raise error

    for _ in script.session.batches([1.0]):
        with suppress(error):
            if in_block:
                with script.session.step():
                    fail()
            else:
                script.session.begin().run(fail)
        break
    assert status_of(script.session) == status


def status_of(session: Session) -> int:
    """The status of a process that ends after what ``session`` has seen, and in no other way."""
    if (child := os.fork()) == 0:
        _end_as_lost(session)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class TornFile(list[float]):
    """Its second batch cannot be read."""

    def __iter__(self) -> Iterator[float]:
        yield self[0]
        raise OSError("stale file handle")


def test_an_error_of_the_loader_ends_the_process_with_status_1(script: Script) -> None:
    """Though the script catches it, outside of its loop. A second loop would begin at the first
    batch, where no other rank is."""

    def train() -> None:
        for batch in script.session.batches(TornFile([1.0, 2.0])):
            with script.session.step():
                script.optimizers[0].step(script.closure(batch))

    with pytest.raises(OSError, match="stale"):
        train()
    assert script.hooks.health.failures == 1
    with pytest.raises(RuntimeError, match=r"in session\.batches\(\): stale file handle\. Other"):
        train()
    assert script.weight == -1.0
    assert status_of(script.session) == 1


@pytest.mark.parametrize("lost", [True, False])
def test_a_script_that_leaves_its_loop_after_a_broken_step_ends_with_status_1(
    lost: bool, script: Script
) -> None:
    """The step would be missing in what it saves, and status 0 would end the whole job."""
    script.hooks.lost = {1} if lost else set()
    for _, batch in zip(range(2), script.session.batches([1.0, 2.0, 4.0]), strict=False):
        with script.session.step():
            script.optimizers[0].step(script.closure(batch))

    assert script.weight == (-1.0 if lost else -3.0)
    assert status_of(script.session) == lost


@pytest.mark.parametrize("swallows", [True, False])
def test_a_broken_step_may_keep_a_script_from_its_optimizer(swallows: bool, script: Script) -> None:
    """By what is left of its numbers, or by an error that a bare ``except`` swallows."""
    given = []
    for batch in script.session.batches([1.0, 2.0]):
        given.append(batch)
        breaks = given == [1.0, 2.0]
        script.hooks.health.broken = breaks and not swallows
        script.hooks.lost = {1} if swallows else set()  # it shows in the vote alone
        with script.session.step() as step:
            if not breaks:
                script.optimizers[0].step(script.closure(batch))
            elif swallows:
                with suppress(Interrupted):
                    script.optimizers[0].step(script.closure(batch))
        assert step.result is (StepResult.SPOILT if breaks else StepResult.COMMITTED)

    assert given == [1.0, 2.0, 2.0]
    assert script.weight == -3.0


def test_an_uncaught_error_in_a_step_ends_the_interpreter_in_order(script: Script) -> None:
    """Its status is 1 in any case, and the script's own files are still to be flushed."""
    for _ in script.session.batches([1.0]):
        with suppress(ValueError), script.session.step():
            raise ValueError
        break
    if (child := os.fork()) == 0:
        sys.last_value = ValueError()
        _end_as_lost(script.session)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_error_that_is_caught_within_the_step_changes_nothing(script: Script) -> None:
    """The parts that follow are called, and the step counts."""

    def fail() -> None:
        raise KeyError("mistake")

    positions = []
    for batch in script.session.batches([2.0, 3.0]):
        step = script.session.begin()
        step.run(script.optimizers[0].step, script.closure(batch))
        with pytest.raises(KeyError, match="mistake"):
            step.run(fail)
        assert step.run(lambda: "later") == "later"
        assert step.end() is StepResult.COMMITTED
        assert not script.session.why_not_done
        positions.append(script.session.position.index)

    assert positions == [1, 2]
    assert script.weight == -5.0


def test_a_step_in_which_no_optimizer_ran_is_refused_at_its_end(script: Script) -> None:
    for _ in script.session.batches([1.0]):
        with pytest.raises(RuntimeError, match=r"no registered optimizer.*step\.skip_update"):
            script.session.begin().end()
        break


def test_a_step_may_end_without_an_update(script: Script) -> None:
    positions, counted = [], []
    for batch in script.session.batches([2.0, float("nan"), 3.0]):
        with script.session.step() as step:
            if batch == batch:
                script.optimizers[0].step(script.closure(batch))
            else:
                step.skip_update()
        counted.append(step.counts)
        positions.append(script.session.position.index)

    assert script.hooks.seen == ["backward", "vote", "apply", "vote", "backward", "vote", "apply"]
    assert (positions, counted) == ([1, 2, 3], [True] * 3)
    assert script.weight == -5.0


def test_no_optimizer_runs_after_an_update_was_left_out(script: Script) -> None:
    """The other ranks have agreed that none does."""
    for _ in script.session.batches([1.0]):
        step = script.session.begin()
        step.run(step.skip_update)
        with pytest.raises(RuntimeError, match=r"an optimizer runs after step\.skip_update"):
            step.run(script.optimizers[0].step, script.closure(1.0))
        break
    assert script.weight == 0.0


def test_a_loop_around_a_generator_may_end_with_break(script: Script) -> None:
    """What the generator yields within a step comes after its vote: the step counts."""

    def trained() -> Iterator[float]:
        for batch in script.session.batches([2.0, 3.0, 4.0]):
            with script.session.step():
                script.optimizers[0].step(script.closure(batch))
                yield batch

    evaluated: list[int] = []
    evaluate = script.session.repeatable(lambda: evaluated.append(1), name="evaluate")
    for batch in trained():
        if batch == 3.0:
            break
    evaluate()

    assert script.weight == -5.0
    assert evaluated == [1]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_script_that_goes_on_after_an_error_in_a_step_is_refused(
    late: bool, again: bool, script: Script
) -> None:
    """With the next batch, or with the same one: other ranks may have committed the step."""
    refusal = pytest.raises(RuntimeError, match=r"after an error in a training step: mistake\. ")

    def go_on() -> None:
        for batch in script.session.batches([1.0, 2.0]):
            for _ in range(1 + again):
                with suppress(ValueError), script.session.step():
                    if late:
                        script.optimizers[0].step(script.closure(batch))
                    raise ValueError("mistake")

    with refusal:
        go_on()
    assert script.hooks.seen.count("vote") == late


class Failing(SGD):
    """Has no memory left for its first update."""

    failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError("no memory")
        return super().step(closure)


@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_step_whose_optimizer_fails_never_counts(in_block: bool, calls: int) -> None:
    """Though the script catches the error, and even if it calls the optimizer again: an update may
    have been made in part."""
    session, model = Session(StandaloneHooks()), nn.Linear(1, 1)
    optimizer = Failing(model.parameters(), lr=1.0)
    session.register(model=model, optimizer=optimizer)

    def train() -> None:
        model(torch.ones(1)).sum().backward()
        for _ in range(calls):
            with suppress(torch.OutOfMemoryError):
                optimizer.step()

    def take_step() -> None:
        if in_block:
            with session.step():
                train()
        else:
            step = session.begin()
            step.run(train)
            step.end()

    for _ in session.batches([1.0]):
        with pytest.raises(RuntimeError, match=r"Failing has failed in a step on whose update"):
            take_step()
        break
    assert session.step_number == 0


class Scaled(Script):
    def others(self) -> dict[str, Any]:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        return {"scaler": self.scaler}

    def backward(self, batch: float) -> None:
        self.scaler.scale(self.model(torch.tensor([batch])).sum()).backward()

    def apply(self) -> None:
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self.model.zero_grad()


@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_a_scaled_loop_leaves_are_reported_once(first: bool) -> None:
    """It may accumulate them: they would be lost with a broken step, and a joiner would not have
    them. Or it drops them, as for a norm that is too large, for which no job must end."""
    script = Scaled()
    found: list[str] = []
    script.hooks.warn = lambda **text: found.extend(text.values())  # type: ignore[method-assign]
    counted = []
    for number, batch in enumerate(script.session.batches([1.0, 2.0, 3.0, 4.0])):
        with script.session.step() as step:
            script.backward(batch)
            if number % 2 == first:
                script.apply()
        counted.append(step.counts)

    assert counted == [True] * 4
    assert len(found) == 1
    assert "use session.batches(loader, accumulate=k)" in found[0]


@pytest.mark.parametrize("bad", ["no gradients", "infinite"])
def test_a_scaled_loop_may_skip_its_optimizer(bad: str) -> None:
    script = Scaled()
    found: list[str] = []
    script.hooks.warn = lambda **text: found.extend(text.values())  # type: ignore[method-assign]
    for number, batch in enumerate(script.session.batches([1.0, 2.0, 3.0])):
        with script.session.step() as step:
            if number == 1:
                if bad == "infinite":
                    script.backward(float("inf"))
                continue
            script.model.zero_grad()
            script.backward(batch)
            script.apply()
        assert step.counts

    assert found == []


def test_two_loops_at_once_are_refused() -> None:
    """A broken step would repeat the batch of one of them only."""
    script = Script()
    first, second = (script.session.batches([1.0, 2.0]) for _ in range(2))
    batch = next(first)
    next(second)
    with script.session.step():
        script.optimizers[0].step(script.closure(batch))
    with pytest.raises(RuntimeError, match="another one had begun"):
        next(first)


def test_a_loop_that_was_left_may_be_kept_by_a_variable() -> None:
    """As a progress bar does."""
    script = Script()
    kept = script.session.batches([1.0, 2.0])
    for batch in kept:
        with script.session.step():
            script.optimizers[0].step(script.closure(batch))
        break
    for batch in script.session.batches([3.0, 4.0]):
        with script.session.step():
            script.optimizers[0].step(script.closure(batch))

    assert script.weight == -8.0


def test_a_wrapper_that_is_no_optimizer_is_refused() -> None:
    session, model = Session(StandaloneHooks()), nn.Linear(1, 1)
    inner = SGD(model.parameters())
    with pytest.raises(TypeError, match=r"there is no torch\.optim\.Optimizer in it"):
        session.register(model=model, optimizer=ExponentialLR(inner, 0.5))


def test_an_optimizer_that_evaluates_its_closure_often_is_refused() -> None:
    session, model = Session(StandaloneHooks()), nn.Linear(1, 1)
    with pytest.raises(TypeError, match="LBFGS"):
        session.register(model=model, optimizer=LBFGS(model.parameters()))


@pytest.mark.parametrize("between", [0, 1])
def test_gradients_that_are_summed_between_two_optimizers_are_refused(between: int) -> None:
    """A rank that is lost then would leave half a step; without such traffic there is one vote."""
    script = Script(optimizers=2)
    first, second = script.optimizers

    def both() -> None:
        for batch in script.session.batches([2.0, 3.0]):
            with script.session.step():
                script.closure(batch)()
                script.hooks.calls += 1
                first.step()
                script.hooks.calls += between
                second.step()

    if between:
        with pytest.raises(RuntimeError, match="Before the first optimizer runs, compute"):
            both()
        assert script.hooks.seen == ["backward", "vote", "apply"]
    else:
        both()
        assert script.hooks.seen == ["backward", "vote", "apply", "apply"] * 2


def test_gradients_that_are_divided_among_ranks_are_summed_before_the_vote() -> None:
    """As those of norms with ``SequenceParallel``. The optimizer would do it, after the vote."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        ones = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
        weights: list[Any] = [nn.Parameter(ones.clone()) for _ in range(2)]
        for weight in weights:
            weight.grad = DTensor.from_local(torch.full((3,), 2.0), mesh, [Partial()])
        optimizers = [SGD([weight], lr=1.0) for weight in weights]
        voted: list[object] = []

        def vote() -> None:
            if not voted:
                voted.extend(weight.grad.placements for weight in weights)

        stage = lambda: Stage.VOTED if voted else Stage.COMPUTING  # noqa: E731
        hooks = OptimizerHooks(vote, lambda _: None, lambda: 0, stage)
        hooks.attach(optimizers, optimizers, [])
        for optimizer in optimizers:
            optimizer.step()
        assert voted == [(Replicate(),)] * 2
        for weight in weights:
            assert torch.equal(weight.to_local(), torch.full((3,), -1.0))
    finally:
        dist.destroy_process_group()


class Sharpness(SGD):
    """Evaluates its closure once more, at perturbed weights, as SAM does."""

    perturbs = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.perturbs:
            closure()
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(1.0 if self.perturbs else 0.0)
        return closure()


@pytest.mark.parametrize("perturbs", [True, False])
def test_an_optimizer_that_evaluates_at_other_weights_is_refused(perturbs: bool) -> None:
    """Its closure runs once, before the vote: it would get the gradients of the first point."""
    session, model = Session(Voting()), nn.Linear(1, 1)
    optimizer = Sharpness(model.parameters())
    optimizer.perturbs = perturbs
    session.register(model=model, optimizer=optimizer)
    for batch in session.batches([torch.ones(1)]):
        with (
            pytest.raises(RuntimeError, match=r"Sharpness.step\(closure\) evaluates its closure"),
            session.step(),
        ):
            optimizer.step(lambda batch=batch: model(batch).sum().backward())
        break


def test_a_second_step_for_one_batch_is_refused(script: Script) -> None:
    """After a loss in it, with the first one committed, it would not come again."""
    for batch in script.session.batches([1.0]):
        with script.session.step():
            script.optimizers[0].step(script.closure(batch))
        with pytest.raises(RuntimeError, match="a second time for one batch"):
            script.session.begin()
    with pytest.raises(RuntimeError, match="or after the loop"):
        script.session.begin()


def test_a_second_step_of_a_broken_batch_is_undone_with_the_first(script: Script) -> None:
    script.hooks.lost = {0}
    results = []
    for batch in script.session.batches([1.0]):
        step = script.session.begin()
        step.run(script.optimizers[0].step, script.closure(batch))
        results.append(step.end())
        if step.result is StepResult.SPOILT:
            again = script.session.begin()
            again.run(script.optimizers[0].step, script.closure(batch))
            results.append(again.end())
    assert results == [StepResult.SPOILT, StepResult.SPOILT, StepResult.COMMITTED]
    assert script.weight == -1.0


def test_an_optimizer_in_the_loop_and_outside_of_a_step_is_refused(script: Script) -> None:
    (optimizer,) = script.optimizers
    for batch in script.session.batches([1.0]):
        with pytest.raises(RuntimeError, match=r"outside of session\.step"):
            optimizer.step(script.closure(batch))
        with script.session.step():
            optimizer.step(script.closure(batch))
        with pytest.raises(RuntimeError, match=r"outside of session\.step"):
            optimizer.step(script.closure(batch))  # also after a step that broke
    optimizer.step(script.closure(1.0))  # behind the loop it is the script's own affair
    assert script.weight == -2.0


def test_an_optimizer_is_the_scripts_own_affair_after_a_break(script: Script) -> None:
    """Also if no step was made of the last batch."""
    for _ in script.session.batches([1.0, 2.0]):
        break
    script.optimizers[0].step(script.closure(1.0))
    assert script.weight == -1.0


class Tailed(Voting):
    """The loader of a standby is too short for what it has to compute. Then it follows a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.tails: list[Optimizer] = []
        self.closed = 0

    def close_feed(self, feed: Feed, local: LocalState) -> bool:
        self.closed += 1
        return self.closed > 1 and super().close_feed(feed, local)

    def boundary(self) -> bool:
        if self.closed == 1:
            for optimizer in self.tails:
                optimizer.step()
        return super().boundary()


def test_a_standby_follows_a_rank_after_a_rest_of_batches() -> None:
    """The rest is too little for a step."""
    hooks = Tailed()
    session, model = Session(hooks), nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    session.register(model=model, optimizer=optimizer)
    for batches in session.batches([torch.ones(1)] * 3, accumulate=2):
        with session.step():
            for batch in batches:
                model(batch).sum().backward()
            optimizer.step()
        hooks.tails = [optimizer]

    assert hooks.closed == 2


def test_a_standby_follows_a_rank_within_an_evaluation_of_the_loop() -> None:
    """A worker that has left its rank in the step before shadows another one there."""
    hooks = Tailed()
    session, model = Session(hooks), nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    session.register(model=model, optimizer=optimizer)
    evaluate = session.repeatable(lambda: None, name="evaluate")
    followed = []
    for batch in session.batches([torch.ones(1)]):
        with session.step():
            model(batch).sum().backward()
            optimizer.step()
        hooks.closed, hooks.tails = 1, [optimizer]
        handle = optimizer.register_step_post_hook(lambda *_: followed.append(1))
        evaluate()
        handle.remove()
        hooks.closed = 0
        with pytest.raises(RuntimeError, match=r"outside of session\.step"):
            optimizer.step()

    assert followed


def once() -> Iterator[float]:
    yield 1.0


@pytest.mark.parametrize(
    "loader",
    [once(), zip([1.0], [2.0], strict=True), enumerate([1.0]), iter([1.0]), map(abs, [1.0])],
    ids=lambda loader: type(loader).__name__,
)
def test_a_loader_that_gives_its_batches_once_is_refused(script: Script, loader: Any) -> None:
    """A worker that takes a rank has drawn from it before."""
    with pytest.raises(ValueError, match=f"a {type(loader).__name__} gives its batches only once"):
        next(iter(script.session.batches(loader)))


def test_a_function_that_makes_such_a_loader_is_taken(script: Script) -> None:
    made = script.session.batches(lambda place: zip([1.0], [2.0], strict=True))
    assert list(made) == [(1.0, 2.0)]


class Lookahead(SGD):
    """Runs another optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], lr=1.0)
        self.inner = inner


class Counting(SGD):
    """Saves more than others do."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 3}


@pytest.mark.parametrize("what", ["inner", "count"])
def test_an_optimizer_with_a_state_that_would_stay_behind_is_refused(what: str) -> None:
    session, model = Session(StandaloneHooks()), nn.Linear(1, 1)
    optimizer = (
        Lookahead(SGD(model.parameters(), lr=1.0))
        if what == "inner"
        else Counting(model.parameters(), lr=1.0)
    )
    with pytest.raises(TypeError, match=f"{what}.* would stay behind"):
        session.register(model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("value", "why"),
    [(np.float32(1.0), "float32 of numpy"), (torch.ones(1, requires_grad=True), "detach")],
)
def test_a_counter_takes_only_what_can_be_sent(value: Any, why: str) -> None:
    counter = Session(StandaloneHooks()).counter("best", np.float64(2.0))
    with pytest.raises(TypeError, match=why):
        counter.value = value
    assert counter.value == 2.0


def test_an_optimizer_whose_step_calls_collectives_is_refused() -> None:
    """They come after the vote, so that a loss in them would leave garbage in a committed step."""
    hooks = Voting()

    class Communicating(SGD):
        def step(self, closure: Any = None) -> Any:
            hooks.calls += 1
            return super().step(closure)

    session, model = Session(hooks), nn.Linear(1, 1)
    optimizer = Communicating(model.parameters())
    session.register(model=model, optimizer=optimizer)

    def train() -> None:
        for batch in session.batches([torch.ones(1)]):
            with session.step():
                hooks.calls += 1  # before the vote
                model(batch).sum().backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match=r"Communicating.step\(\) calls collectives"):
        train()


def test_a_counter_goes_back_with_a_broken_step() -> None:
    """It is registered under its name, and asked for once more it is the same one."""
    hooks = Voting()
    session, model = Session(hooks), nn.Linear(1, 1)
    best = session.counter("best", 9)
    assert session.counter("best", 1) is best
    optimizer = SGD(model.parameters(), lr=0.1)
    session.register(model=model, optimizer=optimizer)
    hooks.lost = {0}
    values = []
    for _ in session.batches([1.0]):
        with session.step() as step:
            model(torch.ones(1)).sum().backward()
            best.value -= 1
            optimizer.step()
        values.append((best.value, step.counts))

    assert values == [(8, False), (8, True)]
    with pytest.raises(RuntimeError, match=r"counter\('late', ...\) before"):
        session.counter("late", 0)


def test_a_counter_of_the_name_of_an_object_is_refused() -> None:
    """One of them would not move."""
    session, model = Session(StandaloneHooks()), nn.Linear(1, 1)
    session.counter("scheduler", 0)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="both name scheduler"):
        session.register(model=model, optimizer=optimizer, scheduler=session.counter("x", 1))


def test_a_role_has_the_counters_of_its_own_build_and_the_common_ones() -> None:
    """A worker that is built as another rank has what that rank has, or its state would not fit."""
    session = Session(StandaloneHooks())
    common = session.counter("common", 1)
    roles = ["first", "second"]

    def build(session: Session) -> None:
        model = nn.Linear(1, 1)
        session.counter(roles[0], 0)
        session.register(model=model, optimizer=SGD(model.parameters(), lr=0.1))

    session.build(build)
    roles.pop(0)
    session._make()

    assert session._registry is not None
    named = session._registry.named
    assert named["common"] is common
    assert named.keys() == {"model", "optimizer", "common", "second"}


class LateState(nn.Linear):
    """Has an extra state from its first forward on, as quantized layers have."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.scale = 1.0
        return super().forward(inputs)

    def get_extra_state(self) -> object:
        return getattr(self, "scale", None)

    def set_extra_state(self, state: object) -> None:
        raise NotImplementedError


def test_an_extra_state_that_comes_with_the_first_forward_is_refused_in_that_step() -> None:
    """At register there is none, and one that appeared later would stay behind."""
    session, model = Session(StandaloneHooks()), LateState(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    session.register(model=model, optimizer=optimizer)
    for _ in session.batches([1.0]):
        step = session.begin()
        model(torch.ones(1)).sum().backward()
        with pytest.raises(TypeError, match="extra state"):
            step.run(optimizer.step)
        break


@pytest.mark.parametrize("next_thing", ["step", "batch"])
def test_a_step_that_was_not_ended_is_an_error(next_thing: str, script: Script) -> None:
    """Its batch would be given again after a loss, onto changed weights."""
    batches = script.session.batches([1.0, 2.0])
    next(batches)
    script.session.begin().run(script.optimizers[0].step, script.closure(1.0))
    with pytest.raises(RuntimeError, match=r"call step.end\(\)"):
        script.session.begin() if next_thing == "step" else next(batches)


def test_a_part_may_be_run_inside_a_block(script: Script) -> None:
    """Code behind a spoilt part computes with nothing, and its error is no error of the script."""
    script.hooks.lost = {0}
    counted = []
    for batch in script.session.batches([2.0]):
        with script.session.step() as step:
            loss = step.run(script.optimizers[0].step, script.closure(batch))
            assert loss is not None
        counted.append(step.counts)

    assert counted == [False, True]


@pytest.mark.parametrize(("partial", "given"), [(False, [[0, 1]]), (True, [[0, 1], [2]])])
def test_a_last_incomplete_list_is_given_if_it_is_asked_for(
    partial: bool, given: list[list[int]], script: Script
) -> None:
    """Again, too, if its step is repeated."""
    script.hooks.lost = {len(given) - 1}
    seen, positions = [], []
    for batches in script.session.batches(range(3), accumulate=2, partial=partial):
        positions.append(script.session.position.index)
        with script.session.step():
            seen.append(batches)
            script.optimizers[0].step(script.closure(1.0))

    assert seen == [*given, given[-1]]
    assert positions == [2 * n for n in range(len(given))] + [2 * (len(given) - 1)]
    assert script.session.position.call == 1
    assert not script.session.skipped


def test_a_function_builds_the_loader_for_the_place_of_the_rank(script: Script) -> None:
    places = []

    def cut(place: DataPlace) -> Iterator[int]:
        places.append(place)
        return iter(range(place.part, 3, place.parts))

    seen = []
    for batch in script.session.batches(cut):
        with script.session.step():
            seen.append(batch)
            script.optimizers[0].step(script.closure(1.0))

    assert places == [DataPlace(0, 1)]
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("forgotten", [False, True])
def test_an_optimizer_without_gradients_is_named_once(
    forgotten: bool, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that optimizes another model than it trains would make no progress."""
    for _ in script.session.batches(range(2)):
        with script.session.step():
            script.optimizers[0].zero_grad()
            if not forgotten:
                script.closure(1.0)()
            script.optimizers[0].step()

    warned = [r for r in caplog.records if "none of its parameters has a gradient" in r.message]
    assert len(warned) == int(forgotten)


@pytest.mark.parametrize(("early", "waits"), [(True, 0), (False, 1)])
def test_a_loss_recorded_before_the_optimizer_is_read_before_it_runs(
    early: bool, waits: int
) -> None:
    """A wait after the optimizer would leave the device idle until the next step begins."""
    twin = Twin()
    before = []

    class Noting(Voting):
        def applying(self, optimizer: Optimizer) -> None:
            before.append(twin.recorder.waits)

    hooks = Noting()
    session = Session(hooks)
    with twin.installed(), twin.training():
        model = nn.Linear(1, 1)
        optimizer = SGD(model.parameters(), lr=1.0)
        session.register(model=model, optimizer=optimizer)
        for _ in session.batches([1.0]):
            with session.step() as step:
                loss = model(torch.ones(1)).sum()
                loss.backward()
                if early:
                    step.record(loss)
                optimizer.step()
                if not early:
                    step.record(loss)
            after = twin.recorder.waits

    assert step.counts
    assert after - before[0] == waits


def test_an_optimizer_that_calls_its_base_sends_its_gradients_once() -> None:
    """Its base has hooks of its own, since the script uses one of that, too. A standby would apply
    the same gradients twice."""

    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    hooks = Voting()
    session = Session(hooks)
    model = nn.Linear(1, 1)
    optimizers = [Own(model.parameters(), lr=0.1), SGD([nn.Parameter(torch.zeros(1))], lr=0.1)]
    session.register(model=model, optimizer=optimizers)
    for batch in session.batches([torch.ones(1)]):
        with session.step():
            model(batch).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

    assert hooks.seen.count("apply") == 2

"""Functions that the session repeats outside of steps: order, repeats, and where they may run."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.trainer.standalone import Script
from tmd.trainer.session.session import Session
from tmd.trainer.session.standalone import StandaloneHooks
from tmd.trainer.state.data import Position


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


class Evaluated(Script):
    """Evaluates after every step; each evaluation has its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[int] = []
        self.positions: list[Position] = []
        self.runs = 0
        self.evaluate = self.session.repeatable(self._evaluate, self.reported.append)

    def others(self) -> dict[str, Any]:
        self.total = self.session.counter("total", 0)
        return {}

    def _evaluate(self) -> int:
        self.positions.append(self.session.position)
        self.runs += 1
        return self.runs

    def step(self, batch: float) -> bool:
        with self.session.step() as step:
            self.optimizers[0].step(self.closure(batch))
        return step.counts


@pytest.fixture
def script() -> Evaluated:
    return Evaluated()


class Gathering(Evaluated):
    """Evaluates a model of FSDP2, too."""

    def others(self) -> dict[str, Any]:
        self.sharded = nn.Linear(1, 1)
        fully_shard(self.sharded, mesh=init_device_mesh("cpu", (2,)))
        return {**super().others(), "sharded": self.sharded}

    def _evaluate(self) -> int:
        with torch.no_grad():
            self.sharded(torch.ones(1, 1))
        self.within = type(self.sharded.weight)
        return super()._evaluate()


@pytest.mark.usefixtures("group")
def test_what_it_gathered_is_released() -> None:
    """FSDP2 keeps what a forward pass without a backward pass has gathered."""
    script = Gathering()
    for batch in script.session.batches([2.0]):
        script.step(batch)
        script.evaluate()

    assert script.within is nn.Parameter
    assert isinstance(script.sharded.weight, DTensor)


def test_it_is_voted_on_and_reported_once(script: Evaluated) -> None:
    for batch in script.session.batches([2.0, 3.0]):
        script.step(batch)
        script.evaluate()

    assert script.hooks.seen == ["backward", "vote", "apply", "vote"] * 2
    assert script.reported == [1, 2]
    assert [(p.index, p.due) for p in script.positions] == [(1, "_evaluate"), (2, "_evaluate")]
    # The end of the loop counts, too.
    assert script.session.step_number == 5


def test_it_is_run_again_if_a_rank_is_lost_in_it(script: Evaluated) -> None:
    """Only what was committed is reported, and the training step before it is not repeated."""
    script.hooks.lost = {1, 2}
    given = []
    for batch in script.session.batches([2.0, 3.0]):
        given.append(batch)
        script.step(batch)
        script.evaluate()

    assert given == [2.0, 3.0]
    assert script.reported == [3, 4]
    assert script.weight == -5.0


def test_it_does_nothing_after_a_step_that_broke(script: Evaluated) -> None:
    """The step is repeated first, and what followed it did not happen."""
    script.hooks.lost = {0}
    counts = []
    for batch in script.session.batches([2.0]):
        counts.append(script.step(batch))
        script.evaluate()

    assert counts == [False, True]
    assert script.reported == [1]


def test_it_runs_after_a_loop_and_between_two(script: Evaluated) -> None:
    for _ in range(2):
        for batch in script.session.batches([2.0, 3.0]):
            script.step(batch)
        script.evaluate()

    assert script.reported == [1, 2]
    assert script.positions == [
        Position(0, 2, due="_evaluate", over=True),
        Position(1, 2, due="_evaluate", over=True),
    ]
    assert script.session.position == Position(2)


def test_it_runs_after_the_last_step_and_after_the_loop(script: Evaluated) -> None:
    """All ranks have voted on the end of the loop between the two."""
    for batch in script.session.batches([2.0]):
        script.step(batch)
        script.evaluate()
    script.evaluate()
    assert script.reported == [1, 2]


def test_a_joiner_runs_what_is_due_before_its_first_batch(script: Evaluated) -> None:
    """It comes from another worker with the position; the script of the joiner never called it."""
    given = []
    batches = script.session.batches([2.0, 3.0, 4.0])
    follow = script.session._cycle
    first = next(batches)
    assert follow.feed is not None
    script.step(first)
    follow.feed.seek(Position(0, 2, due="_evaluate"))
    for batch in batches:
        given.append(batch)
        script.step(batch)

    assert script.reported == [1]
    assert given == [4.0]


def test_a_joiner_of_an_ended_loop_runs_what_is_due_where_the_script_calls_it() -> None:
    """What its script changes on the way there, the rank had changed before its state was copied;
    what follows the call it runs like the other ranks."""
    script = Evaluated()
    total = script.total
    batches = script.session.batches([2.0, 3.0, 4.0])
    script.step(next(batches))
    assert script.session._cycle.feed is not None
    total.value = 10  # as the state of the rank that it takes says
    script.session._cycle.feed.seek(Position(0, 3, due="_evaluate", over=True))

    assert list(batches) == []
    assert script.session.skipped
    total.value += 1  # done by the rank already
    script.evaluate()
    assert script.reported == [1]
    assert not script.session.skipped
    assert total.value == 10
    assert script.session.position == Position(1)


class SentOn(StandaloneHooks):
    """The rank that it joins as is in a later call."""

    is_behind = False

    def boundary(self) -> bool:
        return not self.is_behind


def test_a_joiner_that_is_sent_on_runs_nothing_that_was_due(script: Evaluated) -> None:
    """The rank is past it. What the joiner has got of its state must not be taken back."""
    hooks, ran = SentOn(), list[int]()
    session, model = Session(hooks), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.register(model=model, optimizer=optimizer)
    evaluate = session.repeatable(lambda: ran.append(1), name="evaluate")
    for _ in session.batches([2.0, 3.0, 4.0]):
        with session.step():
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        feed = session._cycle.feed
        assert feed is not None
        feed.seek(Position(0, 3, due="evaluate", over=True))
        hooks.is_behind = True
        with torch.no_grad():
            model.weight.fill_(7.0)
    evaluate()

    assert ran == []
    assert model.weight.item() == 7.0


def test_a_shadow_that_is_sent_on_right_after_it_may_change_what_it_likes() -> None:
    """Behind the loop, as a script does for its next epoch: its rank has done that already."""
    hooks, epochs = SentOn(), 0
    session, model = Session(hooks), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    session.register(model=model, optimizer=optimizer, scheduler=scheduler)
    evaluate = session.repeatable(lambda: None, name="evaluate")
    for _ in range(2):
        for _ in session.batches([2.0, 3.0]):
            with session.step():
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            evaluate()
            hooks.is_behind = epochs == 0
        scheduler.step()
        hooks.is_behind, epochs = False, epochs + 1

    assert epochs == 2


def test_a_joiner_that_does_not_call_what_is_due_is_told(script: Evaluated) -> None:
    """The other ranks wait in it."""
    batches = script.session.batches([2.0, 3.0])
    script.step(next(batches))
    assert script.session._cycle.feed is not None
    script.session._cycle.feed.seek(Position(0, 2, due="_evaluate", over=True))
    assert list(batches) == []
    with pytest.raises(RuntimeError, match=r"was not called after the loop.*session\.skipped"):
        next(script.session.batches([2.0]))


def test_a_change_between_it_and_the_next_batch_is_refused(script: Evaluated) -> None:
    """A joiner would miss it; on the first run it is an error, and not after the first loss."""
    for batch in script.session.batches([2.0, 3.0]):
        script.step(batch)
        script.total.value += 1
        script.evaluate()
    batches = iter(script.session.batches([2.0, 3.0]))
    script.step(next(batches))
    script.evaluate()
    script.total.value += 1
    with pytest.raises(RuntimeError, match="A worker that joins during that function misses"):
        next(batches)


def test_a_change_between_it_and_the_next_loop_is_none_of_its_business(script: Evaluated) -> None:
    """A joiner runs what stands behind the call there."""
    for _ in range(2):
        for batch in script.session.batches([2.0]):
            script.step(batch)
        script.evaluate()
        script.total.value += 1
    assert script.reported == [1, 2]


def test_after_a_loop_that_was_broken_off_it_belongs_to_no_batch(script: Evaluated) -> None:
    """Otherwise a joiner would go on with the batches that nobody else trains on."""
    for batch in script.session.batches([2.0, 3.0, 4.0]):
        script.step(batch)
        if script.session.position.index == 2:
            break
    script.evaluate()
    assert script.positions == [Position(0, 2, due="_evaluate", over=True)]
    assert script.session.position == Position(1)


def test_after_a_loop_that_was_left_before_a_step_it_belongs_to_no_batch(script: Evaluated) -> None:
    """As after an evaluation that decided to end training. What was drawn is not trained on."""
    for batch in script.session.batches([2.0, 3.0, 4.0]):
        if script.session.position.index == 2:
            break
        script.step(batch)
    script.evaluate()
    assert script.positions == [Position(0, 2, due="_evaluate", over=True)]
    assert script.session.position == Position(1)


@pytest.mark.parametrize("after", [True, False])
def test_the_worker_knows_that_a_loop_was_left(after: bool, script: Evaluated) -> None:
    """What follows cannot be repeated: no rank may return to a state from before it."""
    for _ in range(2):
        before = [*script.hooks.left]
        for batch in script.session.batches([2.0, 3.0]):
            if not after and script.session.position.index == 1:
                break
            script.step(batch)
            if after:
                break
    assert (before, script.hooks.left) == ([0], [0, 1])


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_loop_that_is_left_right_after_one_is_warned_of(
    evaluates: bool, script: Evaluated, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that joins in the evaluation would train on."""
    for batch in script.session.batches([2.0, 3.0]):
        script.step(batch)
        if evaluates:
            script.evaluate()
        break
    assert ("Check at the top of the loop's body" in caplog.text) is evaluates


def test_a_loop_that_is_broken_off_after_a_broken_step_is_refused(script: Evaluated) -> None:
    """The step would be missing."""
    script.hooks.lost = {0}
    for batch in script.session.batches([2.0, 3.0]):
        script.step(batch)
        break
    with pytest.raises(RuntimeError, match=r"ask step\.counts before the break"):
        next(script.session.batches([2.0]))


def test_an_optimizer_in_it_is_refused(script: Evaluated) -> None:
    """The collectives after its vote would be protected by none."""
    train = script.session.repeatable(lambda: script.optimizers[0].step(), name="train")
    for batch in script.session.batches([1.0]):
        script.step(batch)
        with pytest.raises(RuntimeError, match=r"train in session\.step"):
            train()
        break


def test_a_call_inside_a_step_is_refused(script: Evaluated) -> None:
    for _ in script.session.batches([1.0]):
        with pytest.raises(RuntimeError, match="between two steps"), script.session.step():
            script.evaluate()
        break


def test_an_error_of_the_function_is_raised(script: Evaluated) -> None:
    def fail() -> None:
        raise KeyError("mistake")

    wrong = script.session.repeatable(fail)
    for batch in script.session.batches([1.0]):
        script.step(batch)
        with pytest.raises(KeyError, match="mistake"):
            wrong()
        script.evaluate()
    assert script.reported == [1], "what failed is not due any more"


@pytest.mark.parametrize("late", [False, True], ids=["in it", "with its result"])
@pytest.mark.parametrize("caught", ["outside", "inside", "at the end"])
def test_a_script_that_ends_after_its_error_is_not_done(
    caught: str, late: bool, script: Evaluated
) -> None:
    """Another rank is in the function, and status 0 would end the job. A script may do without its
    result and go on, and behind the loop it may end without it."""

    def fail(result: object = None) -> None:
        raise KeyError("mistake")

    wrong = script.session.repeatable(lambda: 1, name="late", then=fail)
    if not late:
        wrong = script.session.repeatable(fail)

    def train() -> None:
        for batch in script.session.batches([1.0, 2.0]):
            script.step(batch)
            if caught != "at the end":
                with suppress(KeyError) if caught == "inside" else nullcontext():
                    wrong()
        wrong()

    with pytest.raises(KeyError):
        train()

    assert bool(script.session.why_not_done) is (caught == "outside")


def test_a_result_may_end_the_process(script: Evaluated) -> None:
    """As one that is good enough. The status is that of the script."""

    def end(result: object) -> None:
        raise SystemExit(0)

    enough = script.session.repeatable(lambda: 1, name="enough", then=end)

    def train() -> None:
        for batch in script.session.batches([1.0]):
            script.step(batch)
            enough()

    with pytest.raises(SystemExit):
        train()
    assert script.session.why_not_done == ""


def test_a_second_one_in_the_same_place_is_refused(script: Evaluated) -> None:
    """A worker that joins in the first one could not know that a second one follows."""
    for batch in script.session.batches([1.0]):
        script.step(batch)
        script.evaluate()
        with pytest.raises(RuntimeError, match="put all that runs there into one function"):
            script.evaluate()
        break


def test_a_call_before_the_step_of_a_batch_is_refused(script: Evaluated) -> None:
    for _ in script.session.batches([1.0]):
        with pytest.raises(RuntimeError, match="once between a step and the next batch"):
            script.evaluate()
        break


def test_a_call_before_the_first_loop_is_refused(script: Evaluated) -> None:
    with pytest.raises(RuntimeError, match="inside or after"):
        script.evaluate()


def test_it_must_be_known_before_the_loop_and_by_one_name(script: Evaluated) -> None:
    """A joiner must find it, though it joins before its script comes to the call."""
    for taken in (script._evaluate, partial(script._evaluate)):
        with pytest.raises(ValueError, match="empty or taken: pass another name"):
            script.session.repeatable(taken)
    for batch in script.session.batches([1.0]):
        with pytest.raises(RuntimeError, match="before session\\.batches"):
            script.session.repeatable(lambda: None, name="late")
        script.step(batch)


def test_a_function_that_this_worker_does_not_know_is_named(script: Evaluated) -> None:
    batches = script.session.batches([2.0, 3.0])
    script.step(next(batches))
    assert script.session._cycle.feed is not None
    script.session._cycle.feed.seek(Position(0, 1, due="sample"))
    with pytest.raises(RuntimeError, match="the other ranks run 'sample' now"):
        next(batches)


def test_a_loop_that_the_script_keeps_alive_is_left_when_the_next_one_begins(
    script: Evaluated,
) -> None:
    """Its late end does not concern the next one."""
    kept = script.session.batches([2.0, 3.0])
    script.step(next(kept))
    script.evaluate()
    for batch in script.session.batches([2.0]):
        left, position = [*script.hooks.left], script.session.position
        del kept
        script.step(batch)

    assert (left, position) == ([0], Position(1, 0))
    assert script.hooks.left == [0]

"""The order of an evaluation follows from its step, however often its loader was iterated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from tests.trainer.standalone import Script
from tmd.trainer.session.session import Session
from tmd.trainer.state.evaluations import Evaluations
from tmd.trainer.state.placing import DataPlace

DATA: Any = list(range(32))
HERE = DataPlace(0, 1)


class Counting:
    """Shuffles by the number of its iteration, and counts that itself, as Accelerate's loaders."""

    def __init__(self) -> None:
        self.iteration = 0

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.iteration)
        yield from torch.randperm(32, generator=generator).split(4)
        self.iteration += 1


def shuffled() -> DataLoader[int]:
    return DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(3))


def sampled() -> DataLoader[int]:
    """It takes other samples each time."""
    own = torch.Generator().manual_seed(3)
    return DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=12, generator=own))


def built() -> Callable[[DataPlace], DataLoader[int]]:
    """The script keeps the loader that it builds."""
    kept = shuffled()
    return lambda place: kept


def numbers(evaluations: Evaluations, loader: Any, step: int) -> list[list[int]]:
    return [batch.tolist() for batch in evaluations.placed(loader, HERE, step)]


@pytest.mark.parametrize("make", [Counting, shuffled, sampled, built])
def test_a_repeat_and_a_joiner_have_the_order_of_the_other_ranks(make: Callable[[], Any]) -> None:
    evaluations, loader = Evaluations(print), make()
    numbers(evaluations, loader, 10)
    next(iter(evaluations.placed(loader, HERE, 20)))  # a rank is lost in it
    repeated = [numbers(evaluations, loader, step) for step in (20, 30)]
    joiner = Evaluations(print), make()

    assert repeated == [numbers(*joiner, step) for step in (20, 30)]
    assert repeated[0] != repeated[1]


def test_a_loader_with_no_random_order_of_its_own_is_as_it_was() -> None:
    """One in order, and one that is shuffled by the generator of the step."""
    before = torch.get_rng_state()
    evaluations, loader = Evaluations(print), DataLoader(DATA, 4)
    placed = evaluations.placed(loader, HERE, 20)
    evaluations.placed(DataLoader(DATA, 4, shuffle=True), HERE, 20)

    assert placed is loader
    assert torch.equal(torch.get_rng_state(), before)
    assert [n for batch in loader for n in batch.tolist()] == DATA


def test_a_script_may_choose_the_epoch_of_an_evaluation() -> None:
    evaluations, loader = Evaluations(print), Counting()
    orders = []
    for step in (10, 20):
        evaluations.placed(loader, HERE, step)
        loader.set_epoch(7)
        orders.append([batch.tolist() for batch in loader])

    assert orders[0] == orders[1]


class Evaluated(Script):
    """Evaluates on some of its samples after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.held_out = sampled()

    def evaluate(self) -> None:
        batches = self.session.placed(self.held_out)
        self.seen.append([number for batch in batches for number in batch.tolist()])

    def run(self) -> None:
        session: Session = self.session
        evaluate = session.repeatable(self.evaluate)
        for batch in session.batches([2.0, 3.0]):
            with session.step():
                self.optimizers[0].step(self.closure(batch))
            evaluate()


def test_a_repeated_evaluation_sees_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one sees others, as in a job that loses no rank."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    whole, disturbed = Evaluated(), Evaluated()
    disturbed.hooks.lost = {1}
    whole.run()
    disturbed.run()

    first, second = whole.seen
    assert first != second
    assert disturbed.seen == [first, first, second]

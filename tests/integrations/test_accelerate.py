"""What the helpers for Accelerate make of its optimizers and scalers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from tests.e2e.frameworks import need
from tests.integrations.generators import generator_states
from tests.trainer.standalone import Voting
from tmd.trainer import Session
from tmd.trainer.state.data import Feed
from tmd.trainer.state.evaluations import Evaluations
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.placing import DataPlace
from tmd.trainer.state.state import Registry


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One with a scaler, which Accelerate itself makes on GPUs only."""
    need("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    states: Any = (AcceleratorState, GradientState, PartialState)
    for each in states:
        each._shared_state.clear()
    made = Accelerator(cpu=True)
    made.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    yield made
    for each in states:
        each._shared_state.clear()


def test_the_scaler_of_an_optimizer_moves_with_it(accelerator: Any) -> None:
    """Without it a repeated step would use gradients that are not unscaled. A name that the script
    gives it is kept, as a checkpoint may have it."""
    model = nn.Linear(1, 1)
    optimizers = [accelerator.prepare_optimizer(SGD(model.parameters(), lr=1.0)) for _ in range(2)]
    objects = {"model": model, "optimizer": optimizers[:1]}

    assert Registry(objects).named["optimizer[0].scaler"] is accelerator.scaler
    named = Registry({**objects, "scaler": accelerator.scaler}).named
    assert [name for name, value in named.items() if value is accelerator.scaler] == ["scaler"]


def test_a_loss_in_a_scaled_step_changes_no_number(accelerator: Any) -> None:
    """The gradients are unscaled once in each attempt."""
    from tmd.integrations.accelerate import batches

    def trained(lost: set[int]) -> list[float]:
        hooks = Voting()
        hooks.lost = lost
        session, model = Session(hooks), nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        accelerator.scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=2.0).state_dict())
        optimizer = accelerator.prepare_optimizer(SGD(model.parameters(), lr=1.0))
        session.register(model=model, optimizer=optimizer)
        weights = []
        for drawn in batches(session, accelerator, [1.0, torch.inf, 2.0]):
            with session.step() as step:
                accelerator.backward(model(torch.tensor(drawn)).sum())
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
                optimizer.zero_grad()
            if step.counts:
                weights.append(model.weight.item())
        return weights

    whole = trained(set())
    assert whole == [-1.0, -1.0, -3.0]
    for vote in range(3):
        assert trained({vote}) == whole


def test_a_step_begins_as_if_no_optimizer_had_been_called(accelerator: Any) -> None:
    """A step that broke in its optimizer leaves the mark of a call, which hides an overflow."""
    from tmd.integrations.accelerate import begin_step

    model = nn.Linear(1, 1)
    optimizer = accelerator.prepare_optimizer(SGD(model.parameters(), lr=1.0))
    optimizer._accelerate_step_called = True
    begin_step(accelerator)
    accelerator.backward(model(torch.full((1,), torch.inf)).sum())
    optimizer.step()

    assert optimizer.step_was_skipped


def test_only_the_last_batch_of_the_data_is_the_end_of_its_loader(accelerator: Any) -> None:
    """Though a session draws the batches of a step at once, and looks for more after the last. Else
    ``gather_for_metrics`` would cut other batches, or keep what was filled up."""
    from accelerate import DataLoaderConfiguration

    from tmd.integrations.accelerate import batches, microbatches

    def ends(count: int, batch: int) -> list[tuple[bool, int]]:
        accelerator.gradient_state.plugin_kwargs["num_steps"] = count
        accelerator.dataloader_config = DataLoaderConfiguration(use_seedable_sampler=True)
        rows: Any = [*range(10)]
        loader = accelerator.prepare_data_loader(DataLoader(rows, batch))
        session, model = Session(Voting()), nn.Linear(1, 1)
        optimizer = accelerator.prepare_optimizer(SGD(model.parameters(), lr=1.0))
        session.register(model=model, optimizer=optimizer)
        state, seen = accelerator.gradient_state, []
        for drawn in batches(session, accelerator, loader):
            with session.step():
                for each in microbatches(accelerator, model, drawn):
                    accelerator.backward(model(each.float()[:1, None]).sum())
                    optimizer.step()
                    seen.append((state.end_of_dataloader, state.remainder))
        assert not state.in_dataloader
        return seen

    for count, batch in ((1, 4), (2, 4), (4, 4), (3, 1), (5, 2)):
        length = -(-10 // batch)
        remainder = 10 % batch
        expected = [(False, remainder)] * (length - 1) + [(True, remainder)]
        assert ends(count, batch) == expected, (count, batch)


@pytest.mark.usefixtures("accelerator")
def test_the_accelerator_has_the_rank_that_a_worker_takes_at_the_end_of_a_loop(
    accelerator: Any,
) -> None:
    """It gets no batch there, and the script saves the model on the main process."""
    from tmd.integrations.accelerate import batches

    class Taking(Voting):
        def close_feed(self, feed: Feed, local: LocalState) -> bool:
            self._status = structs.replace(self._status, rank=2)
            return super().close_feed(feed, local)

    session = Session(Taking())
    model = nn.Linear(1, 1)
    optimizer = accelerator.prepare_optimizer(SGD(model.parameters(), lr=1.0))
    session.register(model=model, optimizer=optimizer)
    seen = []
    for drawn in batches(session, accelerator, [1.0]):
        seen.append(accelerator.process_index)
        with session.step():
            accelerator.backward(model(torch.tensor(drawn)).sum())
            optimizer.step()

    assert (seen, accelerator.process_index) == ([0], 2)


def test_the_shards_of_a_shuffled_evaluation_fit_together_on_a_joiner() -> None:
    """It has not run the evaluations before, after which the other ranks shuffle otherwise."""
    from accelerate.data_loader import prepare_data_loader

    def held_out(rank: int) -> Any:
        rows: Any = [*range(24)]
        settings = {"num_processes": 2, "process_index": rank, "use_seedable_sampler": True}
        torch.manual_seed(7)
        return prepare_data_loader(DataLoader(rows, 4, shuffle=True), **settings)

    def part(evaluations: Evaluations, loader: Any, rank: int, step: int) -> list[int]:
        placed = evaluations.placed(loader, DataPlace(rank, 2), step)
        return [number for batch in placed for number in batch.tolist()]

    survivor, joiner = (Evaluations(print), held_out(0)), (Evaluations(print), held_out(0))
    for step in (10, 20):
        part(*survivor, 0, step)
    parts = part(*survivor, 0, 30), part(*joiner, 1, 30)

    assert sorted(parts[0] + parts[1]) == [*range(24)]
    assert parts[0] != part(*survivor, 0, 40)


class Switching(SGD):
    """As optimizers that are schedule-free."""

    def eval(self) -> None:
        """Put the weights of an evaluation in place."""


def test_an_optimizer_that_changes_weights_for_an_evaluation_is_refused(accelerator: Any) -> None:
    from tmd.integrations.accelerate import batches

    session, model = Session(Voting()), nn.Linear(1, 1)
    optimizer = accelerator.prepare_optimizer(Switching(model.parameters(), lr=1.0))
    session.register(model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"does not support Switching, whose eval\(\) changes"):
        next(iter(batches(session, accelerator, [1.0])))


def test_a_tracker_that_cannot_be_made_on_this_worker_is_left_out(
    accelerator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The others log on, and the step draws what it would draw on another worker."""
    from accelerate.tracking import GeneralTracker

    import tmd.integrations.accelerate as adapter

    logged, ended = [], []

    class Lines(GeneralTracker):
        name, requires_logging_directory, tracker = "lines", False, None

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            """None is used."""

        def log(self, values: dict[str, Any], step: int | None, **_: Any) -> None:
            logged.append(values)

        def finish(self) -> None:
            ended.append(type(self).__name__)
            raise OSError("it cannot be finished either")

    class Broken(Lines):
        def start(self) -> None:
            random.random(), np.random.rand(), torch.rand(())
            raise OSError("no network")

    accelerator.log_with = [Broken(), Lines()]
    adapter._tracked[accelerator] = ("job",), {}
    before = generator_states()
    adapter._make_trackers(accelerator, type(accelerator).init_trackers)
    after = generator_states()
    accelerator.log({"loss": 1.0})

    assert before == after
    assert (logged, ended) == ([{"loss": 1.0}], ["Broken"])
    assert len(accelerator.log_with) == 2
    assert "it cannot be made here" in caplog.text

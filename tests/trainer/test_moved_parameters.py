"""A broken step leaves no trace in parameters that a script changes besides their optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tmd.core.values.errors import StateMismatch
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.moved_parameters import MovedParameters
from tmd.trainer.state.state import Registry

Change = Callable[[torch.Tensor], object]
Act = Callable[[], object]


def nothing() -> None:
    """A script that changes no parameter itself."""


def in_place(param: torch.Tensor) -> None:
    with torch.no_grad():
        param.mul_(0.5)


def behind_autograd(param: torch.Tensor) -> None:
    """Old code writes so: it counts as no new version."""
    param.data.mul_(0.5)


def replaced(param: torch.Tensor) -> None:
    """As MoCo's own script does."""
    param.data = param.data * 0.5


CHANGES = pytest.mark.parametrize("change", [in_place, behind_autograd, replaced])


class Job:
    """A model, another one that no optimizer owns, and what a step does to them."""

    def __init__(self) -> None:
        self.model, self.other = nn.Linear(3, 2), nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        registry = Registry({"model": self.model, "other": self.other, "optimizer": self.optimizer})
        self.local = LocalState(registry)
        self.before: list[torch.Tensor] = []

    def begin(self) -> None:
        """A step, before anything is computed in it."""
        self.before = self.values
        self.local.begin()

    def train(self, steps: int, *, before: Act = nothing, after: Act = nothing) -> None:
        """Steps that are committed: ``before`` runs in them, before the optimizer."""
        for _ in range(steps):
            self.begin()
            before()
            self.commit(after)

    def commit(self, after: Act = nothing) -> None:
        """It is committed, and ``after`` runs behind its block."""
        self.model(torch.ones(1, 3)).sum().backward()
        self.local.at_vote()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.local.close()
        after()

    def breaks(self, after: Act = nothing) -> None:
        """It breaks, ``after`` runs all the same, and the step is undone."""
        self.local.set_aside()
        after()
        self.local.undo()

    @property
    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in (*self.model.parameters(), *self.other.parameters())]

    @property
    def undone(self) -> bool:
        return all(map(torch.equal, self.values, self.before))


@CHANGES
def test_what_changes_before_the_vote_is_put_back(change: Change) -> None:
    """A momentum encoder: it has changed in a step before."""
    job = Job()
    job.train(6, before=lambda: change(job.other.weight))
    job.begin()
    change(job.other.weight)
    assert not job.undone
    job.breaks()

    assert job.undone


def test_weights_that_are_perturbed_before_their_optimizer_are_put_back() -> None:
    """SAM: the step breaks at the perturbed point."""
    job = Job()
    for _ in range(6):
        job.begin()
        in_place(job.model.weight)
        with torch.no_grad():
            job.model.weight.mul_(2.0)
        job.commit()
    job.begin()
    in_place(job.model.weight)
    job.breaks()

    assert job.undone


@CHANGES
def test_what_code_after_the_block_changes_is_put_back(change: Change) -> None:
    """An averaged model, updated after each step."""
    job = Job()
    job.train(6, after=lambda: change(job.other.weight))
    job.begin()
    job.breaks(lambda: change(job.other.weight))

    assert job.undone


def test_an_averaged_model_of_torch_is_put_back() -> None:
    model = nn.Linear(3, 2)
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    local = LocalState(Registry({"model": model, "average": average, "optimizer": optimizer}))
    for broken in (False, False, True):
        before = [p.detach().clone() for p in average.parameters()]
        count = average.n_averaged.clone()
        local.begin()
        if broken:
            local.set_aside()
        else:
            model(torch.ones(1, 3)).sum().backward()
            local.at_vote()
            optimizer.step()
        average.update_parameters(model)
    local.undo()

    assert all(map(torch.equal, average.parameters(), before))
    assert torch.equal(average.n_averaged, count)


def test_the_first_step_is_put_back_whatever_it_changes() -> None:
    job = Job()
    job.begin()
    in_place(job.other.weight)
    in_place(job.model.weight)
    job.breaks(lambda: in_place(job.other.bias))

    assert job.undone


def test_the_first_step_with_an_update_is_put_back_whatever_it_changes() -> None:
    """A scaler has skipped the steps before it."""
    job = Job()
    job.begin()
    job.begin()
    in_place(job.other.weight)
    job.breaks()

    assert job.undone


def test_a_step_knows_whether_it_has_changed_what_was_not_copied() -> None:
    """Threads may then have read values of its middle."""
    job = Job()
    torn = []
    for step in range(8):
        job.begin()
        if step >= 6:
            in_place(job.other.weight)
        job.commit()
        torn.append(job.local.torn)

    assert torn == [False] * 6 + [True, False]


def test_a_step_whose_update_is_left_out_knows_it_too() -> None:
    """Its vote comes at the end of the block."""
    job = Job()
    job.train(5)
    job.begin()
    in_place(job.other.weight)
    job.local.at_vote(updates=False)

    assert job.local.torn


def test_an_average_moves_as_a_whole() -> None:
    """A part of it may take steps that are too small for the elements that are looked at."""
    job = Job()
    job.train(6, before=lambda: in_place(job.other.weight))
    job.begin()
    in_place(job.other.weight)
    behind_autograd(job.other.bias)
    job.breaks()

    assert job.undone


def kept_of(model: nn.Module, optimizer: torch.optim.Optimizer, moving: torch.Tensor) -> set[int]:
    """Identities of the parameters that a step copies after six in which ``moving`` has moved."""
    moved = MovedParameters(Registry({"model": model, "optimizer": optimizer}))
    for _ in range(6):
        moved.keep(trains=True)
        in_place(moving)
        moved.look()
    moved.keep(trains=True)
    return set(moved.copies)


def test_a_frozen_part_of_a_trained_model_is_not_copied_with_what_moves_beside_it() -> None:
    """The base of a LoRA job may be as large as the device."""
    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    optimizer = torch.optim.SGD(layers[0].parameters(), 0.1)
    kept = kept_of(nn.Sequential(*layers), optimizer, layers[1].weight)

    assert kept == {id(layers[1].weight)}


def test_what_code_behind_the_block_does_to_trained_weights_is_undone() -> None:
    """It normalizes them, and runs after a broken step, too."""
    job = Job()
    job.train(6, after=lambda: behind_autograd(job.model.weight))
    job.begin()
    job.breaks(lambda: behind_autograd(job.model.weight))

    assert job.undone


def test_a_change_in_a_step_without_an_update_is_learnt() -> None:
    """The next one can be repeated."""
    job = Job()
    job.train(5)
    job.begin()
    in_place(job.other.weight)
    job.local.at_vote(updates=False)
    job.begin()
    in_place(job.other.weight)
    job.breaks()

    assert job.undone


def test_what_a_script_does_behind_a_loop_can_be_taken_back() -> None:
    """It updates an average there, as the rank that the joiner takes had done."""
    job = Job()
    job.local.keep(loose=True)
    before = job.values
    in_place(job.other.weight)
    job.local.undo()

    assert all(map(torch.equal, job.values, before))


def test_a_change_without_a_copy_ends_the_worker_instead_of_going_on_with_other_numbers() -> None:
    """It is the first of its kind, and the step breaks."""
    job = Job()
    job.train(5)
    job.begin()
    in_place(job.other.weight)
    job.local.set_aside()

    with pytest.raises(
        StateMismatch, match=r"other\.weight changed in it before its optimizer ran"
    ):
        job.local.undo()


def test_a_change_without_a_copy_is_noticed_after_a_failed_vote_too() -> None:
    """It has been learnt by then, which gives back no values."""
    job = Job()
    job.train(5)
    job.begin()
    in_place(job.other.weight)
    job.local.at_vote()
    job.local.set_aside()

    with pytest.raises(StateMismatch, match=r"other\.weight changed in it"):
        job.local.undo()


def test_an_average_inside_a_trained_module_moves_as_a_whole() -> None:
    """MoCo's own module has both encoders."""
    both = nn.ModuleDict({"query": nn.Linear(3, 2), "key": nn.Linear(3, 2)})
    query, key = both["query"], both["key"]
    assert isinstance(key, nn.Linear)
    optimizer = torch.optim.SGD(query.parameters(), 0.1)
    kept = kept_of(both, optimizer, key.weight)

    assert kept == {id(key.weight), id(key.bias)}


def test_nothing_is_copied_of_parameters_that_stand_still() -> None:
    """From the second step on, of a frozen model as well. The optimizer's own update is no such
    change, nor is an evaluation with other weights."""
    job = Job()
    for _ in range(5):
        job.train(1)
        job.local.begin(trains=False)
        in_place(job.model.weight)
    job.begin()
    job.local.set_aside()

    assert job.local._moved._copies == {}


def test_a_large_frozen_model_is_not_copied_in_the_first_step() -> None:
    """There may be no memory for it. What an optimizer owns comes first."""
    model, frozen = nn.Linear(3, 2), nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    registry = Registry({"frozen": frozen, "model": model, "optimizer": optimizer})
    moved = MovedParameters(registry, first_bytes=0)
    before = model.weight.detach().clone()
    moved.keep(trains=True)
    in_place(model.weight)
    moved.set_aside()
    moved.put_back()

    assert torch.equal(model.weight, before)
    assert sum(copied.nbytes for copied in moved._copies.values()) < frozen.weight.nbytes


def test_that_copies_are_made_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with caplog.at_level(logging.WARNING, "tmd.trainer"):
        job.train(4, before=lambda: in_place(job.other.weight))

    (said,) = caplog.messages
    assert said.startswith("the script changes other.weight in a step before its optimizer runs")
    assert "(2 parameters, " in said


def test_a_broken_evaluation_with_other_weights_is_no_loss() -> None:
    """It puts the weights back itself, and nobody can tell from their versions."""
    job = Job()
    job.train(5)
    before = job.values
    job.local.begin(trains=False)
    in_place(job.model.weight)
    with torch.no_grad():
        job.model.weight.mul_(2.0)
    job.local.undo()

    assert all(map(torch.equal, job.values, before))


def test_a_state_that_was_put_in_place_is_no_change_by_the_script() -> None:
    """Otherwise each broken step would copy all of a frozen model."""
    job = Job()
    job.train(5)
    in_place(job.other.weight)
    job.local.placed()
    job.begin()
    job.local.set_aside()

    assert job.local._moved._copies == {}


def test_parameters_that_an_optimizer_gets_later_do_not_count_as_moved_by_the_script() -> None:
    """Otherwise each pass of an accumulated step would copy all that fine-tuning has unfrozen."""
    job = Job()
    job.train(5)
    job.optimizer.add_param_group({"params": list(job.other.parameters())})
    ones = torch.ones(1, 3)
    job.train(3, before=lambda: job.other(ones).sum().backward())
    moved = job.local._moved.moved_loose
    job.begin()
    job.local.set_aside()

    assert moved == frozenset()
    assert job.local._moved._copies == {}


def test_parameters_that_an_optimizer_has_given_up_are_learnt_if_the_script_moves_them() -> None:
    job = Job()
    job.train(5)
    job.optimizer.param_groups[0]["params"] = list(job.other.parameters())
    job.local._registry.owners.look()
    job.train(2)
    still = job.local._moved.moved_loose
    job.train(1, after=lambda: in_place(job.model.weight))
    job.begin()

    assert still == frozenset()
    assert job.local._moved.moved_loose == {id(p) for p in job.model.parameters()}

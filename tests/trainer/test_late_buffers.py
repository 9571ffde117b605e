"""Buffers that a module makes in a forward pass, which one of two workers may not have run yet."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.moves import Worker, moved
from tmd.core.values.errors import StateMismatch
from tmd.trainer.state.units import whole_digest
from tmd.trainer.state.unwrapping import Counter

pytestmark = pytest.mark.timeout(60)


class Masked(nn.Module):
    """Has a name for the buffer from the start, or registers it in its first forward pass."""

    def __init__(self, value: float, *, declared: bool = True) -> None:
        super().__init__()
        self.value = value
        self.linear = nn.Linear(3, 3)
        self.inner = nn.Module()
        if declared:
            self.inner.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self.inner, "mask", None) is None:
            self.inner.register_buffer("mask", torch.full((3,), self.value), persistent=False)
        found: Tensor = self.linear(x) * self.inner.mask
        return found


def worker(value: float, *, ran: bool, declared: bool = True) -> tuple[Masked, Worker]:
    model = Masked(value, declared=declared)
    made = Worker(model)
    if ran:
        model(torch.ones(1, 3))
    return model, made


def same(one: Worker, other: Worker) -> bool:
    return whole_digest(one.context.units, 4) == whole_digest(other.context.units, 4)


ANY = pytest.mark.parametrize("here", [False, True], ids=["cold joiner", "warm joiner"])
BOTH = pytest.mark.parametrize("there", [False, True], ids=["before it is made", "after"])


@ANY
@BOTH
def test_a_whole_state_brings_the_buffers_of_its_rank(here: bool, there: bool) -> None:
    """Not more and not fewer: DDP broadcasts all buffers of rank 0 to as many."""
    source, one = worker(5.0, ran=there)
    joiner, other = worker(2.0, ran=here)
    moved(one, other)

    assert same(one, other)
    assert (joiner.inner.mask is not None) is there
    x = torch.ones(1, 3)
    joiner.value = source.value
    assert torch.equal(source(x), joiner(x))


def test_a_rank_that_is_built_anew_keeps_them() -> None:
    source, one = worker(5.0, ran=True)
    again = Masked(2.0)
    x = torch.ones(1, 3)
    before = source(x)
    one.rebuild(again)

    assert torch.equal(before, again(x))


@ANY
@BOTH
@pytest.mark.parametrize("declared", [True, False])
def test_a_state_in_pieces_brings_the_buffers_of_its_rank(
    declared: bool, here: bool, there: bool
) -> None:
    """As a roll-back does to a snapshot from before a buffer was made, and a shadow that jumps."""
    source, one = worker(5.0, ran=there, declared=declared)
    joiner, other = worker(2.0, ran=here, declared=declared)
    for number in range(len(one.context.units)):
        layout, tensors = one.context.units.collect(number)
        other.context.units.place(number, layout, [t.clone() for t in tensors])
    layout, tensors = one.context.units.rest()
    arrived = [t.clone() for t in tensors]
    other.context.units.place_rest(layout, arrived)

    assert same(one, other)
    held = {t.data_ptr() for t in arrived if t.numel()}
    assert not held & {b.data_ptr() for b in joiner.buffers()}
    x = torch.ones(1, 3)
    joiner.value = source.value
    assert torch.equal(source(x), joiner(x))


def test_a_module_may_change_the_size_of_a_buffer_in_its_first_step() -> None:
    """The source was lost in that step: nobody has run it, except the joiner."""
    models = [nn.BatchNorm1d(3) for _ in range(2)]
    for model in models:
        model.register_buffer("cache", torch.zeros(0))
    one, other = map(Worker, models)
    models[1].cache = torch.ones(7)
    moved(one, other)

    assert models[1].cache.shape == (0,)


def test_a_new_buffer_is_where_its_module_is() -> None:
    model = nn.Linear(3, 3, device="meta")
    model.register_buffer("mask", None)
    units = Worker(model).context.units
    source = nn.Linear(3, 3)
    source.register_buffer("mask", torch.ones(3))
    units.place_rest(*Worker(source).context.units.rest())

    assert model.mask is not None
    assert model.mask.device.type == "meta"


def test_a_tensor_of_a_registered_object_is_where_it_was() -> None:
    """It arrives in host memory, and an object may keep what it gets."""
    kept = {
        device: Counter({"sums": [torch.ones(3, device=device)], "steps": 1})
        for device in ("meta", "cpu")
    }
    here, there = (Worker(nn.Linear(1, 1), counter=each).context.units for each in kept.values())
    here.place_rest(*there.rest())

    assert kept["meta"].value["sums"][0].device.type == "meta"
    assert kept["meta"].value["steps"] == 1


def test_a_scheduler_keeps_the_types_of_its_state() -> None:
    """The digest of a state tells a Counter from a dictionary."""
    made = []
    for _ in range(2):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        made.append((Worker(model, optimizer=optimizer, schedule=schedule), schedule))
    (source, _), (joiner, here) = made
    joiner.context.units.place_rest(*source.context.units.rest())

    assert type(here.milestones) is collections.Counter
    digests = [each.context.units.digest_of_rest()["others"] for each in (source, joiner)]
    assert digests[0] == digests[1]


def with_buffer(*, parameter: bool = False) -> nn.Module:
    model = nn.Linear(3, 3)
    if parameter:
        model.extra = nn.Parameter(torch.ones(2))
    else:
        model.register_buffer("extra", torch.ones(2))
    return model


@pytest.mark.parametrize("parameter", [True, False])
def test_another_model_is_still_refused(parameter: bool) -> None:
    """What was there at the registration of one side only was not made while it trained."""
    other = with_buffer(parameter=parameter)
    for source, joiner in ((nn.Linear(3, 3), other), (other, nn.Linear(3, 3))):
        with pytest.raises(StateMismatch, match=r"model.extra: .*absent"):
            moved(Worker(source), Worker(joiner))


def test_a_roll_back_to_another_model_is_refused_before_anything_changes() -> None:
    """As a standby refuses it, which goes on, and not by an error that ends the worker."""
    model = with_buffer()
    copy = Worker(nn.Linear(3, 3)).context.units.rest()

    with pytest.raises(StateMismatch, match=r"buffer model\.extra is here since the registration"):
        Worker(model).context.units.place_rest(*copy)
    assert torch.equal(model.get_buffer("extra"), torch.ones(2))


def test_the_buffers_of_a_part_that_is_made_later_are_left_to_it() -> None:
    """A forward pass makes the part. It brings its own buffers, here as there."""
    whole = nn.ModuleDict({"main": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3, affine=False)})
    bare = nn.ModuleDict({"main": nn.Linear(3, 3)})
    source, joiner = Worker(whole), Worker(bare)
    joiner.context.units.place_rest(*source.context.units.rest())

    assert [name for name, _ in bare.named_buffers()] == []


def test_a_part_that_was_made_later_keeps_its_buffers() -> None:
    """The state is from before it was made: without them its forward pass would fail."""
    source = Worker(nn.ModuleDict({"main": nn.Linear(3, 3)}))
    model = nn.ModuleDict({"main": nn.Linear(3, 3)})
    joiner = Worker(model)
    model["norm"] = nn.BatchNorm1d(3, affine=False)
    joiner.context.units.place_rest(*source.context.units.rest())

    assert sorted(model["norm"]._buffers) == ["num_batches_tracked", "running_mean", "running_var"]

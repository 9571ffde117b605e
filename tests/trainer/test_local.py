"""A poisoned step leaves no trace, and rank-local state survives the loss of its rank."""

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tmd.trainer.state.local import LocalState
from tmd.trainer.state.state import Registry
from tmd.trainer.state.units import Units


def local_of(model: nn.Module, **others: object) -> LocalState:
    return LocalState(Registry({"model": model, **others}))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


class Values:
    """A registered object with plain values and tensors."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = dict(state)


def test_undo_puts_buffers_back_and_clears_gradients() -> None:
    """BatchNorm's statistics and the incomplete gradients of the step are removed."""
    model = normed()
    local = local_of(model)
    for _ in range(2):
        local.begin()
        before = {k: v.clone() for k, v in model.named_buffers()}
        model(torch.randn(4, 3)).sum().backward()
        local.undo()

        assert all(torch.equal(v, before[k]) for k, v in model.named_buffers())
        assert all(p.grad is None for p in model.parameters())
        model(torch.randn(4, 3))


class Making(nn.Module):
    """Its forward makes buffers: one that is declared, one that is not, and one from an empty one.
    It also makes a submodule with a buffer."""

    declared: torch.Tensor | None
    empty: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("declared", None)
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> None:
        if self.declared is None:
            self.declared, self.inner = x.clone(), nn.BatchNorm1d(2)
            self.register_buffer("new", x.clone())
            self.empty.resize_(x.shape).copy_(x)
        else:
            self.declared += x


def test_buffers_that_a_broken_step_makes_are_made_again_in_its_repeat() -> None:
    model = Making()
    local = local_of(model)
    local.begin()
    model(torch.full((2,), 5.0))  # garbage
    local.undo()
    undone = {name for name, _ in model.named_buffers()}, tuple(model.empty.shape)
    local.begin()
    model(torch.ones(2))
    local.begin()
    model(torch.ones(2))
    local.undo()  # the second step

    assert undone[1] == (0,)
    assert undone[0] >= {"empty", "inner.running_mean"}
    assert not undone[0] & {"declared", "new"}
    for name in ("declared", "new", "empty"):
        assert torch.equal(model.get_buffer(name), torch.ones(2)), name


def test_a_buffer_that_a_step_makes_is_in_the_copies_with_which_its_rank_comes_back() -> None:
    """Also once it does not change any more."""
    model = Making()
    local = local_of(model)
    blobs: list[bytes] = []

    def keep(blob: bytes, offset: int) -> bytes:
        blobs.append(blob)
        return blob

    for step in range(3):
        local.begin()
        if step == 0:
            model(torch.ones(2))
        local.exchange_copies(step, 0, 2, keep)

    assert all(b"0.new" in blob and b"0.declared" in blob for blob in blobs)
    assert not local.is_live  # nothing changes it, as a mask that is equal on all ranks

    next_holder = Making()
    again = local_of(next_holder)
    next_holder(torch.zeros(2))  # of the replica's state
    again.adopt(blobs[-1])
    again.begin()

    assert again.own() == blobs[-1]


@pytest.mark.parametrize("made", [False, True], ids=["not made", "of another size"])
def test_a_copy_of_a_buffer_that_is_not_here_is_left_out(made: bool) -> None:
    """A rank has made it from its own batch, and the rank whose state came has not."""
    there, here = Making(), Making()
    copies = local_of(there)
    copies.begin()
    there(torch.ones(2))
    copies.exchange_copies(0, 0, 1, lambda blob, offset: blob)
    blob = copies.own()
    if made:
        here(torch.zeros(3))
    local_of(here).adopt(blob)

    assert b"0.new" in blob
    assert (here.declared is not None) is made


class Twice(nn.Module):
    """Its forward registers a buffer."""

    def forward(self) -> None:
        self.register_buffer("new", torch.ones(2))


def test_a_module_that_is_registered_twice_or_moves_keeps_what_it_had() -> None:
    shared, twice = normed(), Twice()
    shared.register_buffer("own", torch.ones(2), persistent=False)
    one, other = nn.ModuleDict({"a": shared, "t": twice}), nn.ModuleDict({"t": twice})
    local = LocalState(Registry({"one": one, "other": other}))
    local.begin()
    twice()
    one["a"] = nn.Sequential(shared)  # under another path
    local.undo()

    assert not hasattr(twice, "new")
    assert torch.equal(shared.get_buffer("own"), torch.ones(2))
    assert "own" not in shared.state_dict()


@pytest.mark.usefixtures("group")
def test_each_step_broadcasts_the_buffers_of_ddp() -> None:
    """Also one that follows an evaluation, as in a worker that has not run this evaluation."""
    model = DistributedDataParallel(normed())
    local = local_of(model)
    with torch.no_grad():
        model(torch.randn(4, 3))
    assert not model.will_sync_module_buffers()
    local.begin()

    assert model.will_sync_module_buffers()


@pytest.mark.usefixtures("group")
def test_an_evaluation_leaves_nothing_gathered() -> None:
    """FSDP2 keeps what it gathers for a backward pass, which an evaluation does not have."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    local = local_of(model)
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert not isinstance(model.weight, DTensor)
    local.release()

    assert isinstance(model.weight, DTensor)


@pytest.mark.usefixtures("group")
def test_of_a_distributed_buffer_only_the_own_part_is_touched() -> None:
    """The fake group computes nothing: a collective would leave garbage."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    model = nn.Linear(2, 2)
    own = torch.ones(2)
    mesh = init_device_mesh("cpu", (2,))
    model.register_buffer("spread", DTensor.from_local(own, mesh, [Shard(0)], run_check=False))
    registry = Registry({"model": model})
    local, units = LocalState(registry), Units(registry)
    local.begin()
    layout, values = units.rest()
    kept = [value.clone() for value in values]
    own.fill_(5)
    local.undo()
    undone = own.clone()
    own.fill_(7)
    units.place_rest(layout, kept)

    assert [type(value) for value in values] == [torch.Tensor]
    assert undone.tolist() == own.tolist() == [1.0, 1.0]


def test_a_lost_ranks_buffers_are_kept_by_its_neighbours() -> None:
    """A joiner adopts at step 5 what rank 0 copies to others before the vote of step 4."""
    models = [normed() for _ in range(3)]
    locals_ = [local_of(m) for m in models]
    wire: dict[tuple[int, int], bytes] = {}
    for rank, model in enumerate(models):
        model(torch.randn(4, 3) + rank)

    def sender(rank: int, payload: bytes, offset: int) -> bytes:
        wire[rank, offset] = payload
        return b""

    for rank, local in enumerate(locals_):
        local.exchange_copies(4, rank, 3, partial(sender, rank))
    locals_[1].exchange_copies(4, 1, 3, lambda p, o: wire[(1 - o) % 3, o])
    joiner = normed()
    adopting = local_of(joiner)
    joiner(torch.randn(4, 3))
    adopting.adopt(locals_[1].held(0, 5))

    ours, theirs = dict(models[0].named_buffers()), dict(joiner.named_buffers())
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert locals_[1].held(0, 4) == b""


def test_buffers_of_a_neighbour_can_come_from_a_checkpoint() -> None:
    """They are stored as if they had been exchanged, except those that are of another size here."""
    lost, own, joiner = (normed() for _ in range(3))
    lost(torch.randn(4, 3))
    keeper, adopting = local_of(own), local_of(joiner)
    saved = {f"0.{name}": buffer for name, buffer in lost.named_buffers()}
    saved |= {"0.1.running_var": torch.ones(7), "0.gone": torch.ones(2), "0.empty": torch.empty(0)}
    own.register_buffer("mask", torch.ones(1 << 15))
    saved["0.mask"] = torch.ones(1 << 15)
    for rank in keeper.neighbours(2, 4):
        keeper.hold(rank, 5, saved)
    adopting.adopt(keeper.held(1, 5))

    assert keeper.ranks_held(5) == (0, 1)
    assert len(keeper.held(1, 5)) < 1 << 10
    assert torch.equal(joiner.get_buffer("1.running_mean"), lost.get_buffer("1.running_mean"))
    assert joiner.get_buffer("1.running_var").tolist() == [1.0] * 3
    assert local_of(nn.Linear(2, 2)).neighbours(2, 4) == {}


def test_a_constant_buffer_is_not_copied_and_exchanges_stay_alike() -> None:
    """A causal mask costs an empty message, even on a worker that has received it in a transfer."""
    sent: list[bytes] = []

    def keep(payload: bytes, offset: int) -> bytes:
        sent.append(payload)
        return payload

    for received in (False, True):
        model = nn.Linear(2, 2)
        model.register_buffer("mask", torch.ones(64, 64))
        if received:
            model.get_buffer("mask").copy_(torch.ones(64, 64))
        local = local_of(model)
        local.begin()
        local.exchange_copies(0, 0, 4, keep)

    assert len(set(sent)) == 1
    assert len(sent) == 4
    assert len(sent[0]) < 8


def test_a_buffer_that_is_replaced_is_put_back() -> None:
    """A script may assign a new tensor instead of writing to the old one."""
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(3))
    local = local_of(model)
    local.begin()
    model.mean = model.get_buffer("mean") + 1
    local.undo()

    assert torch.equal(model.get_buffer("mean"), torch.zeros(3))


def test_nan_is_no_change() -> None:
    """A metric that is not a number is still the same one afterwards."""
    values = Values(best=float("nan"), tensor=torch.tensor([1.0, float("nan")]))
    local = local_of(normed(), values=values)
    local.begin()
    unchanged = local.changed()
    values.held["best"] = 1.0

    assert not unchanged
    assert local.changed()


def test_undo_takes_back_a_scheduler_step_after_the_block() -> None:
    """A poisoned step leaves the block early but does not skip what follows it."""
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    local = local_of(model, optimizer=optimizer, scheduler=scheduler)
    local.begin()
    before = scheduler.state_dict()
    optimizer.step()
    scheduler.step()
    local.undo()

    assert scheduler.state_dict() == before
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_a_repeated_step_unscales_its_gradients_again(enabled: bool) -> None:
    """Whether or not the scaler scales: scripts build a disabled one for all types but float16."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    local = local_of(model, optimizer=optimizer, scaler=scaler)
    scales = []
    for _ in range(2):
        local.begin()
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        scaler.unscale_(optimizer)
        scales.append(scaler.get_scale())
        local.undo()

    assert scales == [scaler.get_scale()] * 2
    assert all(p.grad is None for p in model.parameters())


def test_looking_for_buffers_takes_no_search_in_every_module() -> None:
    """A model may have thousands of modules, and it is done at least twice in a step."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)), nn.BatchNorm1d(2))
    local = local_of(model)
    calls: list[int] = []

    def counted(act: Callable[[], object]) -> None:
        calls.append(0)

        def count(frame: FrameType, event: str, argument: object) -> None:
            calls[-1] += event == "call"

        sys.setprofile(count)
        try:
            act()
        finally:
            sys.setprofile(None)

    counted(lambda: list(model.named_buffers()))
    counted(lambda: local.has_buffers)

    assert calls[1] < 1.5 * calls[0]


# --- large buffers --------------------------------------------------------------------------------


class Large(nn.Module):
    """A buffer of more than 64 KiB, and one that is made in a forward pass."""

    bank: torch.Tensor
    mask: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(20_000))
        self.register_buffer("mask", None)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_large_buffer_that_begins_to_change_late_is_put_back(replaces: bool) -> None:
    """From the step on that follows the first change."""
    model = Large()
    local = local_of(model)

    def change() -> None:
        if replaces:
            model.bank = model.bank + 1
        else:
            model.bank += 1

    for step in range(10):
        local.begin()
        if step >= 5:
            change()
        local.at_vote()
        local.look()
        if step >= 5:
            assert model.bank[0] == step - 4
            local.begin()
            change()
            local.undo()
            assert model.bank[0] == step - 4

    assert local.is_live


def test_a_large_buffer_that_changes_now_and_then_is_put_back() -> None:
    """Also if many steps lie between two changes."""
    model = Large()
    local = local_of(model)
    for step in range(60):
        local.begin()
        if step % 10 == 9:
            model.bank += 1
        local.at_vote()
        local.look()
    before = model.bank.clone()
    local.begin()
    model.bank += 1
    local.undo()

    assert torch.equal(model.bank, before)


def test_another_state_is_not_overwritten_by_what_was_here_before() -> None:
    """It is received into the memory of the buffer itself."""
    model = Large()
    local = local_of(model)
    for _ in range(5):
        local.begin()
        local.at_vote()
        local.look()
    model.bank.data.fill_(7.0)
    local.placed()
    local.begin()
    local.undo()

    assert model.bank[0] == 7.0


def test_a_tensor_of_a_parameter_group_stays_the_one_that_the_script_holds() -> None:
    """Such as its learning rate, which it fills itself."""
    model, rate = nn.Linear(2, 2), torch.tensor(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    local = local_of(model, optimizer=optimizer)
    local.begin()
    rate.fill_(0.25)
    optimizer.param_groups[0]["made"] = 1
    local.undo()

    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
    assert "made" not in optimizer.param_groups[0]


def test_a_table_of_rates_stays_as_it_is() -> None:
    """A script takes another entry of it in each step."""
    model, rates = nn.Linear(2, 2), torch.tensor([0.5, 0.25])
    optimizer = torch.optim.Adam(model.parameters(), lr=rates[0])
    before = optimizer.param_groups[0]["lr"]
    local = local_of(model, optimizer=optimizer)
    local.begin()
    optimizer.param_groups[0]["lr"] = rates[1]
    local.undo()

    assert optimizer.param_groups[0]["lr"] is before
    assert rates.tolist() == [0.5, 0.25]


def exchanged(local: LocalState, model: nn.Module, *, step: int = 4) -> None:
    """A step up to its vote."""
    local.begin()
    model(torch.randn(4, 3))
    local.at_vote()
    local.exchange_copies(step, 0, 2, lambda blob, offset: blob)


def test_buffers_that_a_script_changes_after_the_vote_are_named_once() -> None:
    """A rank that is lost then would come back without that, as with an average of the buffers."""
    model = normed()
    local = local_of(model)
    exchanged(local, model)
    found = [local.changed_since_vote()]
    for name in ("running_mean", "running_mean", "running_var"):
        exchanged(local, model)
        with torch.no_grad():
            model.get_buffer(f"1.{name}").mul_(0.5)
        found.append(local.changed_since_vote())

    assert found == [[], ["1.running_mean"], [], ["1.running_var"]]


def test_what_an_undone_step_has_changed_is_not_the_script_s() -> None:
    model = normed()
    local = local_of(model)
    local.begin()
    model.get_submodule("1").running_mean = torch.ones(3)
    local.exchange_copies(4, 0, 2, lambda blob, offset: blob)
    local.undo()

    assert local.changed_since_vote() == []


def test_the_state_of_another_rank_is_no_late_change() -> None:
    """A worker that gave up its rank shadows another one: its script has changed nothing."""
    model = normed()
    registry = Registry({"model": model})
    local = LocalState(registry)
    units = Units(registry, local.start)
    layout, tensors = units.rest()
    there = [tensor.clone() for tensor in tensors]
    exchanged(local, model)
    units.place_rest(layout, there)
    found = local.changed_since_vote()
    exchanged(local, model)
    with torch.no_grad():
        model.get_buffer("1.running_mean").mul_(0.5)

    assert found == []
    assert local.changed_since_vote() == ["1.running_mean"]

"""An optimizer divided among ranks: each part belongs to one rank and never replaces another's."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fabric.circle import circle
from tests.trainer.contexts import context_of
from tests.trainer.test_state import move as move_whole
from tests.trainer.test_units import move as move_in_pieces
from tmd.core.values.errors import StateMismatch
from tmd.fabric import Fabric
from tmd.trainer.checkpoints.saving import Saving, ordered
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.state.compatibility import part_mismatch
from tmd.trainer.state.data import Position
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.replicas import all_alike, all_different, partition
from tmd.trainer.state.state import Registry
from tmd.trainer.state.units import Units, whole_digest
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.parameter_resync import ParameterResync

SIZE = 4


def become(rank: int) -> None:
    """A group of one rank, which sends nothing."""
    if dist.is_initialized():
        if dist.get_rank() == rank:
            return
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIZE)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Script:
    """The optimizer of rank ``rank``: rank 0 owns the first parameter, rank 3 the last one."""

    def __init__(self, rank: int, seed: int = 0, *, views: bool = False) -> None:
        become(rank)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        params = list(self.model.parameters())
        self.whole = ZeroRedundancyOptimizer(
            [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2]}],
            AdamW,
            parameters_as_bucket_view=views,
            lr=0.1,
        )
        self.scheduler = StepLR(self.whole, 1, 0.5)
        self.registry = Registry(
            {"model": self.model, "optimizer": self.whole, "scheduler": self.scheduler}
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.whole.zero_grad()
            self.model(torch.ones(2, 6)).square().sum().backward()
            self.whole.step()
            self.scheduler.step()

    @property
    def rates(self) -> list[float]:
        return [group["lr"] for group in self.whole.param_groups]


Move = Callable[[Script, Script], None]


def in_pieces(source: Script, target: Script) -> None:
    move_in_pieces(Units(source.registry), Units(target.registry))


def at_once(source: Script, target: Script) -> None:
    move_whole(source.registry, target.registry)


@pytest.mark.parametrize("move", [in_pieces, at_once])
@pytest.mark.parametrize("warm", [0, 2], ids=["cold joiner", "warm joiner"])
@pytest.mark.parametrize("views", [False, True], ids=["plain", "views"])
def test_the_part_of_a_rank_arrives_whole(move: Move, warm: int, views: bool) -> None:
    """Values that a scheduler set on the whole optimizer arrive too, and later steps are equal."""
    source, target = Script(1, seed=1, views=views), Script(1, seed=2, views=views)
    source.train(3)
    target.train(warm)
    units, others = Units(source.registry), Units(target.registry)

    move(source, target)
    assert whole_digest(units, 0) == whole_digest(others, 0)
    assert target.rates == source.rates == [0.0125, 0.0125]
    for script in (source, target):
        script.train(2)
    assert whole_digest(units, 0) == whole_digest(others, 0)


def test_units_have_the_same_numbers_on_all_ranks() -> None:
    """Every rank has all parameters; each keeps the state of its own."""
    kept = []
    for rank in range(SIZE):
        script = Script(rank)
        script.train(1)
        units = Units(script.registry)
        shapes = [tuple(p.shape) for p in units.params]
        kept.append([units.owner(n) is not None for n in range(len(units))])

        assert shapes == [(5, 6), (5,), (4, 5), (4,)]
        assert not units.stale
    assert [sum(rank) for rank in zip(*kept, strict=True)] == [1, 1, 1, 1]


def test_placed_parameters_stay_views_of_the_broadcast_buckets() -> None:
    """Parameters that are views of buckets stay such."""
    source, target = Script(1, seed=1, views=True), Script(1, seed=2, views=True)
    source.train(1)
    at_once(source, target)
    held = {b.untyped_storage().data_ptr() for buckets in target.whole._buckets for b in buckets}

    assert {p.untyped_storage().data_ptr() for p in target.model.parameters()} <= held


def context(script: Script) -> RankContext:
    return context_of(script.registry, wrapped=(script.model,))


def test_the_part_of_another_rank_is_refused_with_the_remedy() -> None:
    """Shapes are equal: the names of parameters show the difference."""
    mine, theirs = context(Script(3)), context(Script(0))
    offer = Offer(theirs.state.layouts, (), (), Position())

    assert mine.fit.refusal(0, offer).startswith(
        "optimizer keeps the state of model.2.bias here, and of model.0.weight there: "
        "build model and optimizer in session.build(function)"
    )
    assert part_mismatch(mine.state.layouts, context(Script(3, seed=7)).state.layouts) == ""


def test_a_copy_of_another_rank_is_never_restored() -> None:
    """Even if the copy is already stored here."""

    class OfAnother:
        layouts = context(Script(0)).state.layouts

    state = context(Script(3)).state
    with pytest.raises(StateMismatch, match=r"session\.build"):
        state.put_back(OfAnother())  # type: ignore[arg-type]


def test_a_divided_state_is_unique_whatever_the_model_says() -> None:
    """A script may declare replicas, but not against the optimizer."""
    script = Script(0)
    frozen = nn.Linear(2, 2).requires_grad_(False)

    assert partition([frozen], None, SIZE) == all_alike(SIZE)
    assert partition([frozen], None, SIZE, script.registry.divided) == all_different(SIZE)
    with pytest.raises(ValueError, match=r"ranks \(0, 1\) are not equal"):
        partition([frozen], [[0, 1], [2], [3]], SIZE, script.registry.divided)
    pairs = [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert partition([frozen], pairs, 8, script.registry.divided) == tuple(map(tuple, pairs))


def test_an_optimizer_that_steps_before_the_vote_is_refused() -> None:
    """Its broadcasts and its work are part of DDP's backward pass."""
    become(0)
    params = nn.Linear(2, 2).parameters()
    whole = ZeroRedundancyOptimizer(params, AdamW, overlap_with_ddp=True, lr=0.1)

    with pytest.raises(TypeError, match="overlap_with_ddp"):
        Registry({"optimizer": whole})


def test_a_poisoned_step_leaves_no_trace_in_the_scripts_optimizer() -> None:
    """A scheduler writes to it, and the next step would take it from there."""
    script = Script(0)
    state = LocalState(script.registry)
    state.begin()
    for group in script.whole.param_groups:
        group["lr"] = 7.0
    state.undo()

    assert script.rates == [0.1, 0.1]


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with circle(1) as c:
        yield c.fabrics[0]


def test_parameters_are_broadcast_once_in_each_epoch(fabric: Fabric) -> None:
    """Of what is registered then; a job without such an optimizer never."""
    script, done = Script(0), []
    whole: Any = script.whole
    whole._sync_params = lambda: done.append("zero")
    plain = Registry({"model": script.model, "optimizer": AdamW(script.model.parameters())})
    resync = ParameterResync(plain, fabric)
    never = resync.is_due(1)
    plain.renew(script.registry.named)
    seen = []
    for epoch in (1, 1, 2):
        seen.append(resync.is_due(epoch))
        if seen[-1]:
            resync.broadcast(epoch)

    assert (never, seen, done) == (False, [True, False, True], ["zero", "zero"])


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_values_computed_from_torn_parameters_are_not_used(
    fabric: Fabric, torn: bool, averages: bool, back: bool
) -> None:
    """An averaged copy cannot be levelled; it need not where all have gone back."""
    script = Script(0)
    average = AveragedModel(script.model)
    models = [script.model, average]
    registry = Registry({**script.registry.named, "model": models})
    if averages:
        update = average.update_parameters
        script.whole.register_step_post_hook(lambda *_: update(script.model))
    resync = ParameterResync(registry, fabric)
    script.train(1)
    if torn:
        fabric.poison("a rank is lost")
    script.train(1)
    if back:
        resync.restored()

    if torn and averages and not back:
        with pytest.raises(RuntimeError, match="spoilt"):
            resync.broadcast(2)
    else:
        resync.broadcast(2)


def test_values_computed_between_two_divided_optimizers_are_noticed(fabric: Fabric) -> None:
    """It is the first one that left parameters torn."""
    script = Script(0)
    params = list(script.model.parameters())
    wholes = [ZeroRedundancyOptimizer(part, AdamW, lr=0.1) for part in (params[:2], params[2:])]
    average = AveragedModel(script.model)
    resync = ParameterResync(
        Registry({"model": [script.model, average], "optimizer": wholes}), fabric
    )
    script.model(torch.ones(2, 6)).square().sum().backward()
    fabric.poison("a rank is lost")
    wholes[0].step()
    average.update_parameters(script.model)
    wholes[1].step()

    assert "spoilt" in resync.spoilt


def test_a_checkpoint_of_it_is_refused() -> None:
    registry = Script(0).registry

    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        Saving(
            ordered("somewhere", 1, 1, at_end=False),
            registry,
            lambda: all_different(SIZE),
            SIZE,
            print,
            lambda: str,
        )

"""A worker's offer of its state to a joiner that asks during a step."""

from collections.abc import Callable

import pytest
import torch
from msgspec import structs
from torch import nn

from tests.trainer.contexts import NoGroups, context_of
from tmd.core.planning.directives import Sync
from tmd.core.values.errors import StateMismatch
from tmd.core.values.model import Membership
from tmd.fabric import GroupView
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.state.roles import Role
from tmd.trainer.state.state import Registry
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.obstacle import Rebuild


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def built(
    model: nn.Module,
    *,
    several: bool,
    optimize: Callable[[nn.Module], torch.optim.Optimizer] = plain,
    groups: tuple[GroupView, ...] = (),
) -> tuple[RankContext, Registry]:
    registry = Registry({"model": model, "optimizer": optimize(model)})
    return context_of(registry, NoGroups(groups), wrapped=(model,), several=several), registry


def sync(resume: int, plan: str = "p") -> Sync:
    return Sync(plan, Membership(epoch=2, members=()), 1, resume, ())


def test_all_ranks_rebuild_if_no_step_was_committed() -> None:
    """Once for each directive, which is repeated after the rebuild."""
    context, _ = built(nn.Linear(2, 2), several=True)
    context.fit.start_over(sync(1))
    for plan in ("p", "q"):
        assert context.fit.start_over(sync(0, plan)) == Rebuild(1, cold=True)
        assert context.fit.start_over(sync(0, plan)) == ""


def test_a_script_that_cannot_build_again_never_starts_over() -> None:
    """Its step is run again as it stands."""
    assert built(nn.Linear(2, 2), several=False)[0].fit.start_over(sync(0)) == ""


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def test_a_state_outlives_what_is_built_around_it() -> None:
    """The optimizer state survives, too."""
    model = nn.Linear(2, 2)
    context, registry = built(model, several=True, optimize=momentum)
    state = context.state
    model(torch.ones(1, 2)).sum().backward()
    registry.optimizers[0].step()
    layouts, tensors = state.taken()
    wanted = [t.clone() for t in tensors]
    again = nn.Linear(2, 2)
    state.early.stand(1)
    state.early.begin()
    state.drop_objects()
    registry.renew({"model": again, "optimizer": momentum(again)})
    state.renew()
    fresh = state.early.of(1)()
    state.early.stand(1)
    state.early.begin()
    state.give(layouts, tensors)

    assert state.early.of(1)() != fresh
    found = registry.collect()[1]
    assert len(found) == 4
    assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


def test_a_survivor_never_continues_with_fresh_weights() -> None:
    """If the second build differs, the rank is lost, and reported as lost."""
    context, registry = built(nn.Linear(2, 2), several=True)
    state = context.state
    taken = state.taken()
    state.drop_objects()
    wider = nn.Linear(2, 3)
    registry.renew({"model": wider, "optimizer": momentum(wider)})
    state.renew()
    with pytest.raises(StateMismatch, match="rebuilt with a different state"):
        state.give(*taken)


def offered(context: RankContext, *row: GroupView) -> Offer:
    """An offer of one of two ranks with different builds, with these groups of each."""
    known = tuple(Role(str(rank), (rank,)) for rank in range(2))
    return structs.replace(context.fit.offer(context.state.layouts), groups=(row, row), roles=known)


def test_a_rank_that_sums_in_other_buckets_is_refused() -> None:
    """The model here is without DDP."""
    world = GroupView("0", (0, 1))
    context, _ = built(nn.Linear(2, 2), several=False, groups=(world,))
    offer = offered(context, world)
    first, last = offer.roles
    other = structs.replace(offer, roles=(first, structs.replace(last, buckets="1 0")))

    assert [bool(context.fit.refusal(rank, other)) for rank in range(2)] == [False, True]
    assert "DDP groups gradients into other buckets" in str(context.fit.adopted(1, other))


def test_other_groups_are_refused_before_a_rebuild() -> None:
    """In the script's function they would have the wrong size, or not exist."""
    world, extra = GroupView("0", (0, 1)), GroupView("1", (0, 1))
    context, _ = built(nn.Linear(2, 2), several=True, groups=(world,))
    fit = context.fit
    directive, other = sync(0), offered(context, world, extra)

    for refusal in (fit.refusal(1, other), fit.start_over(directive, other)):
        assert "has the process groups [[0, 1], [0, 1]]" in str(refusal)
    assert fit.roles.known == ()
    assert fit.refusal(1, offered(context, world)) == Rebuild(1)
    rebuild = fit.start_over(directive, offered(context, world), survives=True)
    assert rebuild == Rebuild(1, cold=True, keeps=True)

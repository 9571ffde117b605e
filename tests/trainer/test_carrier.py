"""What a worker offers of its state to a joiner that asks while a step is under way."""

import threading
from collections.abc import Callable

import pytest
import torch
from msgspec import structs
from torch import nn

from tmd.core.planning.directives import Sync
from tmd.core.values.errors import StateMismatch
from tmd.core.values.model import Membership
from tmd.fabric import GroupTable, GroupView
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.roles import RebuildRequired, Role
from tmd.trainer.state.state import Registry
from tmd.trainer.state.units import Units
from tmd.trainer.state_transfer.carrier import StateTransfer


class Reducing(nn.Linear):
    """As DDP does it: whoever asks while a step waits for others is kept waiting as well."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock = threading.Lock()
        self.buckets = ""

    def _get_ddp_logging_data(self) -> dict[str, str]:
        with self.lock:
            return {"rebuilt_per_bucket_param_indices": self.buckets}


class NoGroups:
    """A fabric, as far as a carrier asks it."""

    rank = 0

    def __init__(self, built: tuple[GroupView, ...] = ()) -> None:
        self.built = built
        self.table: GroupTable = ()

    def learn(self, table: GroupTable) -> None:
        self.table = table


def test_an_offer_does_not_wait_for_the_step_of_others() -> None:
    """It has the buckets that the main thread saw when they were settled."""
    model = Reducing()
    registry = Registry({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    transfer = StateTransfer(NoGroups(), registry, Units(registry), [model], LocalState(registry))
    seen = [transfer.look_at_buckets()]
    model.buckets = "1 0"
    seen += [transfer.look_at_buckets(), transfer.look_at_buckets()]
    offers = []
    with model.lock:
        asker = threading.Thread(target=lambda: offers.append(transfer.offer(transfer.layouts)))
        asker.start()
        asker.join(timeout=30)

        assert [o.buckets for o in offers] == ["1 0"]
        assert seen == ["", "1 0", "1 0"]


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def carrier_of(
    model: nn.Module,
    *,
    several: bool,
    optimize: Callable[[nn.Module], torch.optim.Optimizer] = plain,
    built: tuple[GroupView, ...] = (),
) -> tuple[StateTransfer, Registry]:
    registry = Registry({"model": model, "optimizer": optimize(model)})
    parts = NoGroups(built), registry, Units(registry), [model], LocalState(registry)
    return StateTransfer(*parts, several=several), registry


def sync(resume: int, plan: str = "p") -> Sync:
    return Sync(plan, Membership(epoch=2, members=()), 1, resume, ())


def test_where_no_step_was_committed_all_build_again() -> None:
    """Once for each decision: what asked for it comes again."""
    transfer, _ = carrier_of(nn.Linear(2, 2), several=True)
    transfer.start_over(sync(1))
    for plan in ("p", "q"):
        with pytest.raises(RebuildRequired) as raised:
            transfer.start_over(sync(0, plan))
        transfer.start_over(sync(0, plan))

        assert (raised.value.rank, raised.value.cold) == (1, True)


def test_a_script_that_cannot_build_again_never_starts_over() -> None:
    """Its step is run again as it stands."""
    carrier_of(nn.Linear(2, 2), several=False)[0].start_over(sync(0))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def test_a_state_outlives_what_is_built_around_it() -> None:
    """With what the optimizer remembers."""
    model = nn.Linear(2, 2)
    transfer, registry = carrier_of(model, several=True, optimize=momentum)
    model(torch.ones(1, 2)).sum().backward()
    registry.optimizers[0].step()
    layouts, tensors = transfer.taken()
    wanted = [t.clone() for t in tensors]
    again = nn.Linear(2, 2)
    transfer.early.stand(1)
    transfer.early.begin()
    transfer.let_go()
    registry.renew({"model": again, "optimizer": momentum(again)})
    transfer.renew()
    fresh = transfer.early.of(1)()
    transfer.early.stand(1)
    transfer.early.begin()
    transfer.give(layouts, tensors)

    assert transfer.early.of(1)() != fresh
    found = registry.collect()[1]
    assert len(found) == 4
    assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


def test_who_survives_does_not_go_on_with_fresh_weights() -> None:
    """If its function builds otherwise the second time: then the rank is lost, and known to be."""
    transfer, registry = carrier_of(nn.Linear(2, 2), several=True)
    taken = transfer.taken()
    transfer.let_go()
    wider = nn.Linear(2, 3)
    registry.renew({"model": wider, "optimizer": momentum(wider)})
    transfer.renew()
    with pytest.raises(StateMismatch, match="built otherwise"):
        transfer.give(*taken)


def offered(transfer: StateTransfer, *row: GroupView) -> Offer:
    """By one of two ranks that are built unlike, with these groups of each."""
    known = tuple(Role(str(rank), (rank,)) for rank in range(2))
    return structs.replace(transfer.offer(transfer.layouts), groups=(row, row), roles=known)


def test_other_groups_are_told_before_another_role_is_built() -> None:
    """In the script's function they would be of the wrong size, or not there at all."""
    world, extra = GroupView("0", (0, 1)), GroupView("1", (0, 1))
    transfer, _ = carrier_of(nn.Linear(2, 2), several=True, built=(world,))
    directive, other = sync(0), offered(transfer, world, extra)

    assert "has the process groups [[0, 1], [0, 1]]" in transfer.refusal(1, other)
    assert "has the process groups [[0, 1], [0, 1]]" in transfer.start_over(directive, other)
    assert transfer.roles.known == ()
    with pytest.raises(RebuildRequired):
        transfer.refusal(1, offered(transfer, world))
    with pytest.raises(RebuildRequired) as raised:
        transfer.start_over(directive, offered(transfer, world), survives=True)
    assert raised.value.keeps

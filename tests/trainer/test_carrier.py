"""What a worker offers of its state to a joiner that asks while a step is under way."""

import threading

import pytest
import torch
from torch import nn

from tmd.core.duties import Sync
from tmd.core.model import Membership
from tmd.trainer.carrier import Carrier
from tmd.trainer.local import LocalState
from tmd.trainer.roles import OtherRole
from tmd.trainer.state import Registry
from tmd.trainer.units import Units


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
    table = ()
    rank = 0


def test_an_offer_does_not_wait_for_the_step_of_others() -> None:
    """It has the buckets that the main thread saw when they were settled."""
    model = Reducing()
    registry = Registry({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    carrier = Carrier(NoGroups(), registry, Units(registry), [model], LocalState(registry))
    seen = [carrier.look_at_buckets()]
    model.buckets = "1 0"
    seen += [carrier.look_at_buckets(), carrier.look_at_buckets()]
    offers = []
    with model.lock:
        asker = threading.Thread(target=lambda: offers.append(carrier.offer(carrier.layouts)))
        asker.start()
        asker.join(timeout=30)

        assert [o.buckets for o in offers] == ["1 0"]
        assert seen == ["", "1 0", "1 0"]


def carrier_of(model: nn.Module, *, several: bool) -> tuple[Carrier, Registry]:
    registry = Registry({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    parts = NoGroups(), registry, Units(registry), [model], LocalState(registry)
    return Carrier(*parts, several=several), registry


def sync(resume: int, plan: str = "p") -> Sync:
    return Sync(plan, Membership(epoch=2, members=()), 1, resume, ())


def test_where_no_step_was_committed_all_build_again() -> None:
    """Once for each decision: what asked for it comes again."""
    carrier, _ = carrier_of(nn.Linear(2, 2), several=True)
    carrier.start_over(sync(1))
    for plan in ("p", "q"):
        with pytest.raises(OtherRole) as raised:
            carrier.start_over(sync(0, plan))
        carrier.start_over(sync(0, plan))

        assert (raised.value.rank, raised.value.cold) == (1, True)


def test_a_script_that_cannot_build_again_never_starts_over() -> None:
    """Its step is run again as it stands."""
    carrier_of(nn.Linear(2, 2), several=False)[0].start_over(sync(0))


def test_a_state_outlives_what_is_built_around_it() -> None:
    """Unless the rank is built otherwise: then it is another one's."""
    carrier, registry = carrier_of(nn.Linear(2, 2), several=True)
    layouts, tensors = carrier.taken()
    wanted = [t.clone() for t in tensors]
    for width in (2, 3):
        model = nn.Linear(2, width)
        carrier.let_go()
        registry.renew({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
        carrier.renew()
        carrier.give(layouts, tensors)
        same = [torch.equal(p, w) for p, w in zip(model.parameters(), wanted, strict=True)]

        assert all(same) == (width == 2)

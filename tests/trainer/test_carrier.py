"""What a worker offers of its state to a joiner that asks while a step is under way."""

import threading

import torch
from torch import nn

from tmd.trainer.carrier import Carrier
from tmd.trainer.local import LocalState
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

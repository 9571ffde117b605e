"""The whole state of a rank moves over a link, as at a switch or after a loss."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn
from torch.optim import SGD

from tests.trainer.contexts import NoGroups, context_of
from tests.trainer.wire import linked
from tmd.core.planning.directives import Prepare
from tmd.core.values.model import Member, Membership
from tmd.trainer.protocol.offers import StateHeader
from tmd.trainer.protocol.take_over import Takeover
from tmd.trainer.state.data import Feed
from tmd.trainer.state.placing import DataPlace
from tmd.trainer.state.state import Registry
from tmd.trainer.state_transfer import stream

PREPARE = Prepare("p", Membership(2, ()), 0, Member("w", "h", "h:1"), 0)


class Worker:
    """Has registered a model, its optimizer and other objects."""

    def __init__(self, model: nn.Module, **others: Any) -> None:
        """``others`` may name another optimizer."""
        self.registry = Registry(_objects(model, others))
        fabric = NoGroups()
        fabric.table = ((),)
        self.context = context_of(self.registry, fabric)
        self.state = self.context.state
        self.state.feed = Feed(range(9), 0, lambda: 1, lambda: DataPlace(0, 1))

    def rebuild(self, model: nn.Module, **others: Any) -> None:
        """Build the objects anew and restore their state, as before the first step."""
        kept = self.state.taken()
        self.state.drop_objects()
        self.registry.renew(_objects(model, others))
        self.state.renew()
        self.state.give(*kept)


def moved(source: Worker, joiner: Worker) -> None:
    """Give ``joiner`` the whole state of ``source``, in this thread. Raises StateMismatch."""
    layouts, tensors = source.state.collect()
    header = StateHeader(4, source.context.fit.offer(layouts), graded=source.state.graded)
    with ThreadPoolExecutor(1) as pool, linked() as (near, far):

        def send() -> None:
            stream.offer(near, header)
            stream.send_tensors(near, tensors)

        sent = pool.submit(send)
        takeover = Takeover(PREPARE, far, stream.consider(far))
        assert joiner.context.transfer.receive(takeover, lambda: False) is None
        sent.result()


def _objects(model: nn.Module, others: dict[str, Any]) -> dict[str, object]:
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1), **others}

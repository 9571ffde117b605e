"""A job adds a parameter group between two ``batches()`` calls, as fine-tuning often does.

A standby comes through the same code on its way to the rank's data position, and adds it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from tests.fabric.circle import at_once
from tests.trainer.contexts import NoGroups, context_of
from tests.trainer.scripts import inputs
from tests.trainer.wire import linked
from tmd.core.planning.directives import Prepare
from tmd.core.values.errors import StateMismatch
from tmd.core.values.model import Member, Membership
from tmd.fabric import Link
from tmd.trainer.protocol.offers import StateHeader
from tmd.trainer.protocol.take_over import Takeover
from tmd.trainer.state.data import Feed
from tmd.trainer.state.placing import DataPlace
from tmd.trainer.state.state import Registry
from tmd.trainer.state.units import whole_digest
from tmd.trainer.state_transfer import stream
from tmd.trainer.state_transfer.obstacle import NextLoop

pytestmark = pytest.mark.timeout(60)

PREPARE = Prepare("p", Membership(2, ()), 0, Member("w", "h", "h:1"), 0)


class Tuned:
    """The head is trained from the first call on, the body from the second."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 4)
        self.optimizer = AdamW(self.head.parameters(), lr=0.1)
        fabric = NoGroups()
        fabric.table = ((),)
        model = nn.ModuleList([self.body, self.head])
        registry = Registry({"model": model, "optimizer": self.optimizer})
        self.context = context_of(registry, fabric)
        self.enter(0)

    def enter(self, call: int) -> None:
        """Come to a ``batches()`` call, and run the code before it."""
        if call == 1:
            self.optimizer.add_param_group({"params": list(self.body.parameters()), "lr": 0.01})
        self.context.state.feed = Feed(range(9), call, lambda: 1, lambda: DataPlace(0, 1))

    def train(self, *batches: int) -> None:
        for batch in batches:
            self.optimizer.zero_grad()
            self.head(self.body(inputs(batch))).square().mean().backward()
            self.optimizer.step()


@pytest.fixture
def source() -> Tuned:
    found = Tuned(1)
    found.train(0, 1)
    found.enter(1)
    found.train(2, 3)
    return found


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    with linked() as found:
        yield found


def header_of(source: Tuned) -> StateHeader:
    state = source.context.state
    return StateHeader(4, source.context.fit.offer(state.collect()[0]), graded=state.graded)


def test_a_standby_comes_to_the_call_before_its_groups_are_compared(
    source: Tuned, ends: tuple[Link, Link]
) -> None:
    """It receives the state there, and computes the same bits from then on."""
    joiner = Tuned(2)
    near, far = ends
    header = header_of(source)
    takeover = Takeover(PREPARE, far, header)
    first = joiner.context.transfer.receive(takeover, lambda: False)
    joiner.enter(1)

    def send() -> None:
        stream.offer(near, header)
        stream.send_tensors(near, source.context.state.collect()[1])

    def receive() -> object:
        takeover.header = stream.consider(far)
        return joiner.context.transfer.receive(takeover, lambda: False)

    found = at_once([send, receive])
    for each in (source, joiner):
        each.train(4, 5)

    assert first == NextLoop()
    assert found == [None, None]
    ours, theirs = (each.context.state.collect() for each in (source, joiner))
    assert ours[0] == theirs[0]
    assert all(map(torch.equal, ours[1], theirs[1]))


def test_a_standby_without_the_group_refuses_before_anything_is_copied(
    source: Tuned, ends: tuple[Link, Link]
) -> None:
    """The rank has added it in the middle of a call. Both sides are told, and can go on."""
    joiner = Tuned(2)
    joiner.context.state.feed = Feed(range(9), 1, lambda: 1, lambda: DataPlace(0, 1))
    near, far = ends

    def refused(act: Callable[[], object]) -> str:
        with pytest.raises(StateMismatch) as refusal:
            act()
        return str(refusal.value)

    def receive() -> object:
        takeover = Takeover(PREPARE, far, stream.consider(far))
        return joiner.context.transfer.receive(takeover, lambda: False)

    found = at_once(
        [
            lambda: refused(lambda: stream.offer(near, header_of(source))),
            lambda: refused(receive),
        ]
    )

    assert found[0].endswith(found[1])
    assert "parameter groups of [2] parameters here, of [2, 2] there: " in found[1]
    assert "add parameter groups there, and not in a loop" in found[1]


def test_the_state_of_an_added_parameter_is_shadowed_and_compared(source: Tuned) -> None:
    """Otherwise a shadow would go on without its moments, and no digest would show it."""
    joiner = Tuned(2)
    joiner.enter(1)
    ours, theirs = source.context.units, joiner.context.units
    number = next(n for n, p in enumerate(ours.params) if p is source.body.weight)
    before = whole_digest(ours, 4)
    source.optimizer.state[source.body.weight]["exp_avg"].add_(1.0)
    after = whole_digest(ours, 4)
    for each in range(len(ours)):
        layout, tensors = ours.collect(each)
        theirs.place(each, layout, [t.clone() for t in tensors])
    theirs.place_rest(*ours.rest())

    assert number in ours.of(0)
    assert before != after == whole_digest(theirs, 4)
    moments = joiner.optimizer.state[joiner.body.weight]["exp_avg"]
    assert torch.equal(moments, source.optimizer.state[source.body.weight]["exp_avg"])


def test_a_shadow_without_the_group_refuses_the_rank(source: Tuned) -> None:
    """Instead of ending with the error of a loop."""
    joiner = Tuned(2)

    with pytest.raises(StateMismatch, match="AdamW has 1 parameter groups here, and 2 there"):
        joiner.context.units.place_rest(*source.context.units.rest())


def test_a_rank_that_is_built_anew_without_the_group_is_not_restored(source: Tuned) -> None:
    """Its values would be lost without a word, or with an error from inside the optimizer."""
    again = Tuned(2)

    with pytest.raises(StateMismatch, match="was rebuilt with a different state: optimizer: "):
        again.context.state.give(*source.context.state.taken())


def test_a_parameter_that_joins_a_group_is_one_of_its_optimizer() -> None:
    """The number of groups stays the same."""
    tuned = Tuned(0)
    units = tuned.context.units
    before = len(units.of(0))
    tuned.optimizer.param_groups[0]["params"].append(tuned.body.weight)

    assert (before, len(units.of(0))) == (2, 3)

"""Copies and digests made in a step hold its start, whatever it changes before its vote."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.fabric.circle import at_once
from tests.trainer.wire import LOOK_S, PATIENCE, Facts, Held
from tmd.trainer.protocol.frames import Unit
from tmd.trainer.protocol.outbox import Outbox
from tmd.trainer.state.digests import Digest
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.state import Registry
from tmd.trainer.state.step_start import StepStart
from tmd.trainer.state.units import UnitDigest, Units, whole_digest
from tmd.trainer.state.window import Window
from tmd.trainer.state_transfer.early_digest import EarlyDigest

pytestmark = pytest.mark.timeout(30)
STEP = 7


class Moving:
    """A model with an encoder that follows it in each step, before the optimizer runs."""

    def __init__(self) -> None:
        self.query, self.key = nn.Linear(3, 2), nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.query.parameters(), 0.1, momentum=0.9)
        registry = Registry({"query": self.query, "key": self.key, "optimizer": self.optimizer})
        self.local = LocalState(registry)
        self.units = Units(registry, self.local.start)
        self.window = Window(lambda: self.units.params, self.local.start)

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            # As old code writes it: no version of the parameter tells of it.
            slow.data.mul_(0.5).add_(fast.data, alpha=0.5)

    def step(self) -> None:
        self.local.begin()
        self.follow()
        self.commit()

    def commit(self) -> None:
        self.query(torch.ones(1, 3)).sum().backward()
        self.local.at_vote()
        self.local.release_start()
        self.optimizer.step()


@pytest.fixture(params=[0, 6], ids=["first step", "later step"])
def moving(request: pytest.FixtureRequest) -> Moving:
    made = Moving()
    for _ in range(request.param):
        made.step()
    return made


def test_a_digest_in_the_step_is_that_of_its_start(moving: Moving) -> None:
    start = whole_digest(moving.units, STEP)
    moving.window.open(STEP)
    moving.local.begin()
    digest = UnitDigest(moving.units, STEP)
    moving.follow()
    found: list[Digest] = []

    def beside() -> None:
        while not digest.complete:
            with moving.window.reading() as version:
                assert version == STEP
                digest.advance()
        found.append(digest.parts())

    at_once([beside])

    assert found == [start]


def test_a_copy_in_the_step_is_that_of_its_start(moving: Moving) -> None:
    """For a joiner or a snapshot."""
    start = [p.detach().clone() for p in moving.units.params]
    outbox = Outbox(1 << 20)
    moving.local.begin()
    moving.follow()
    found = []
    for number in range(len(moving.units)):
        layout, tensors = moving.units.at_start(number)
        entry = outbox.copy(Unit(STEP, number, layout), tensors)
        assert entry is not None
        found.append(entry[1][: start[number].nbytes].view(torch.float32))

    assert all(torch.equal(a, b.flatten()) for a, b in zip(found, start, strict=True))


def test_a_digest_of_a_broken_step_is_that_of_its_start(moving: Moving) -> None:
    """It begins in the step, whose parameters are put back before its end is awaited."""
    early = EarlyDigest(moving.units)
    early.stand(STEP)
    start = whole_digest(moving.units, STEP)
    moving.local.begin()
    moving.follow()
    early.begin()
    early.finish()
    moving.local.set_aside()
    moving.local.undo()

    assert early.of(STEP)() == start == whole_digest(moving.units, STEP)


def test_what_code_behind_a_broken_step_changes_is_not_in_its_digest() -> None:
    """An average that follows the model after each step, also after one that breaks."""
    moving = Moving()
    for _ in range(6):
        moving.local.begin()
        moving.commit()
        moving.follow()
    early = EarlyDigest(moving.units)
    early.stand(STEP)
    start = whole_digest(moving.units, STEP)
    moving.local.begin()
    moving.local.set_aside()
    moving.follow()
    early.begin()
    early.finish()
    moving.local.undo()

    assert early.of(STEP)() == start


def test_after_the_step_its_new_values_are_read(moving: Moving) -> None:
    moving.step()

    read = [moving.units.at_start(number)[1][0] for number in range(len(moving.units))]

    assert all(map(torch.equal, read, moving.units.params))


@pytest.mark.parametrize("end", [LocalState.release_start, LocalState.undo, LocalState.placed])
def test_nothing_is_kept_beyond_the_step(end: Callable[[LocalState], None]) -> None:
    """Or for longer than another state was put in place."""
    moving = Moving()
    moving.local.begin()
    moving.follow()
    end(moving.local)
    moving.follow()

    assert torch.equal(moving.units.at_start(2)[1][0], moving.key.weight)


def test_a_step_changes_parameters_once_the_piece_in_hand_is_read() -> None:
    start, param, held = StepStart(), nn.Parameter(torch.ones(4)), Held()
    order: list[str] = []

    def reader() -> None:
        with start.reading():
            held.stay()
            order.append("read")

    def step() -> None:
        assert held.wait()
        start.keep({id(param): param.detach().clone()})
        order.append("kept")

    def look() -> None:
        assert held.wait()
        assert not Facts().within(LOOK_S, lambda: bool(order))
        held.let_go()

    at_once([reader, step, look])

    assert order == ["read", "kept"]


@pytest.mark.parametrize("_", range(10))
def test_a_reader_that_comes_again_at_once_does_not_overtake_the_step(_: int) -> None:
    """Else a reader of many pieces would hold up training for all of them."""
    start, order = StepStart(), list[str]()
    inside = threading.Event()

    def read_on() -> None:
        with start.reading():
            inside.set()
            Facts().until(start._turn.locked)
        with start.reading():
            order.append("next piece")

    def step() -> None:
        assert inside.wait(PATIENCE)
        start.keep({0: torch.zeros(1)})
        order.append("step")

    at_once([read_on, step])

    assert order == ["step", "next piece"]


def test_what_no_tail_can_follow_travels_with_the_rest() -> None:
    """The encoder that moves in each step, and nothing that an optimizer owns."""
    source, joiner = Moving(), Moving()
    for _ in range(3):
        source.step()
    source.local.begin()
    joiner.units.place_rest(*source.units.rest(moving=True))

    assert all(map(torch.equal, joiner.key.parameters(), source.key.parameters()))
    assert not torch.equal(joiner.query.weight, source.query.weight)


def test_a_state_without_what_has_moved_is_placed() -> None:
    """As in checkpoints of 0.1.0, and in snapshots."""
    source, joiner = Moving(), Moving()
    source.step()
    before = joiner.key.weight.clone()
    joiner.units.place_rest(*source.units.rest())

    assert torch.equal(joiner.key.weight, before)


def test_a_state_that_is_put_in_place_is_no_change_by_the_script() -> None:
    """A frozen model that a joiner got would travel at each boundary of a later move."""
    source, joiner = Moving(), Moving()
    joiner.local.begin()
    joiner.commit()
    for number in range(len(joiner.units)):
        joiner.units.place(number, *source.units.collect(number))
    joiner.local.begin()
    joiner.commit()

    assert joiner.local.start.moved() == frozenset()


def test_what_has_just_moved_for_the_first_time_travels_with_the_rest() -> None:
    """An average that begins late, seen before the next step begins."""
    moving = Moving()
    for _ in range(6):
        moving.local.begin()
        moving.commit()
    with torch.no_grad():
        moving.key.weight.mul_(0.5)

    assert moving.local.start.moved() == {*map(id, moving.key.parameters())}

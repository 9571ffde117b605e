"""A state that is placed in pieces is the same state, whatever was there before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, Adagrad

from tests.trainer.scripts import Averaged, Closed, Forked, Scheduled, Script, normed
from tmd.trainer.state.units import TRAIL, Units, whole_digest

SCRIPTS: dict[str, Callable[[int], Script]] = {
    "AdamW": Script,
    "momentum": lambda s: Script(s, lambda m: [SGD(m.parameters(), lr=0.1, momentum=0.9)]),
    "state from the start": lambda s: Script(s, lambda m: [Adagrad(m.parameters(), lr=0.1)]),
    "lists in the state": Closed,
    "scheduler": Scheduled,
    "rate in a tensor": lambda s: Scheduled(s, torch.tensor(0.01)),
    "missing gradients": Forked,
    "buffers": lambda s: Script(s, build=normed),
    "loose parameters": Averaged,
}


def move(source: Units, target: Units) -> None:
    """As over a link: the arriving tensor is another one."""
    for number in range(len(source)):
        layout, tensors = source.collect(number)
        target.place(number, layout, [t.clone() for t in tensors])
    layout, tensors = source.rest()
    target.place_rest(layout, [t.clone() for t in tensors])


@pytest.mark.parametrize("make", SCRIPTS.values(), ids=SCRIPTS.keys())
@pytest.mark.parametrize("there", [0, 2], ids=["cold joiner", "warm joiner"])
@pytest.mark.parametrize("here", [0, 3], ids=["before the first step", "in training"])
def test_a_state_arrives_in_pieces(make: Callable[[int], Script], here: int, there: int) -> None:
    """The digest is equal, and so are the bits of the following steps."""
    source, target = make(1), make(2)
    source.train(range(here))
    target.train(range(100, 100 + there))
    units, others = Units(source.registry()), Units(target.registry())
    assert whole_digest(units, 0) != whole_digest(others, 0)

    move(units, others)
    assert whole_digest(units, 0) == whole_digest(others, 0)
    for script in (source, target):
        script.train(range(50, 53))
    assert whole_digest(units, 0) == whole_digest(others, 0)


def test_placed_units_share_no_memory_with_received_tensors() -> None:
    """The body of a frame holds many tensors: none may keep the whole body alive."""
    source, target = Script(1), Script(2)
    source.train(range(2))
    units, others = Units(source.registry()), Units(target.registry())
    layout, tensors = units.collect(0)
    arrived = [t.clone() for t in tensors]
    others.place(0, layout, arrived)
    memory = {t.data_ptr() for t in arrived}

    assert not memory & {t.data_ptr() for t in others.collect(0)[1]}


def test_every_part_of_a_state_is_in_the_digest() -> None:
    """A difference is attributed to the part that contains it."""
    for act, part in (
        (lambda s: next(s.model.parameters()).data.view(-1)[:1].add_(1), "parameters and"),
        (lambda s: s.model.get_buffer("1.running_var").add_(1), "buffers"),
        (lambda s: setattr(s.scheduler, "last_epoch", 77), "others"),
    ):
        script = Scheduled(1)
        if part == "buffers":
            script.model = normed()
        units = Units(script.registry())
        before = whole_digest(units, 0)
        act(script)
        after = whole_digest(units, 0)
        (differs,) = [k for k in before if k != TRAIL and before[k] != after[k]]
        assert differs.startswith(part)

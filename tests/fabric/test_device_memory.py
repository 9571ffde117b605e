"""No group is built where training would then lack memory of its device."""

from __future__ import annotations

import pytest
import torch

from tmd.fabric.generations.device_memory import BuildMemory
from tmd.fabric.generations.inner import CannotBuildBeside

GPU = torch.device("cuda", 0)


class Card:
    """A card with ``free`` bytes."""

    def __init__(self, free: int) -> None:
        self.free = free

    def read(self, device: torch.device) -> int:
        assert device == GPU
        return self.free


def fail(memory: BuildMemory, card: Card, *, takes: int) -> None:
    """Build a group, of which a peer is missing."""
    with memory.measured("g", GPU, beside=False):
        card.free -= takes
        raise ValueError("no peer")


def built(memory: BuildMemory, card: Card, group: str = "g", *, takes: int, beside: bool) -> None:
    if beside:
        memory.check(group, GPU)
    with memory.measured(group, GPU, beside=beside):
        card.free -= takes


def assert_need(memory: BuildMemory, card: Card, size: int) -> None:
    """A second set fits into ``size`` bytes, and into no fewer."""
    card.free = size
    memory.check("g", GPU)
    card.free = size - 1

    with pytest.raises(CannotBuildBeside, match="a second set"):
        memory.check("g", GPU)


def test_a_second_set_needs_what_the_first_has_taken() -> None:
    card = Card(1000)
    memory = BuildMemory(card.read)
    built(memory, card, takes=400, beside=False)
    built(memory, card, takes=400, beside=True)

    with pytest.raises(RuntimeError, match="a second set of communicators needs"):
        built(memory, card, takes=400, beside=True)
    assert card.free == 200


def test_after_a_loss_groups_are_built_whatever_is_free() -> None:
    """The job stands still, and what the aborted groups hold is about to be freed."""
    card = Card(1000)
    memory = BuildMemory(card.read)
    for _ in range(3):
        built(memory, card, takes=400, beside=False)

    assert card.free == -200


def test_each_group_has_a_need_of_its_own() -> None:
    card = Card(1000)
    memory = BuildMemory(card.read)
    built(memory, card, "large", takes=600, beside=False)
    built(memory, card, "small", takes=100, beside=False)
    built(memory, card, "small", takes=100, beside=True)

    with pytest.raises(RuntimeError, match="a second set"):
        built(memory, card, "large", takes=600, beside=True)


@pytest.mark.parametrize("odd", [700, 1], ids=["allocates", "frees"])
def test_one_build_beside_training_says_nothing_yet(odd: int) -> None:
    """A need that is too large would never be corrected: without a build there is no other."""
    card = Card(5000)
    memory = BuildMemory(card.read)
    built(memory, card, takes=300, beside=False)
    built(memory, card, takes=odd, beside=True)

    assert_need(memory, card, 300)


def test_no_build_needs_more_than_the_first() -> None:
    card = Card(5000)
    memory = BuildMemory(card.read)
    for takes in (300, 700, 700, 700):
        built(memory, card, takes=takes, beside=True)

    assert_need(memory, card, 300)


@pytest.mark.parametrize("odd", [700, 1], ids=["allocates", "frees"])
def test_what_training_does_meanwhile_is_no_need(odd: int) -> None:
    """The median of several builds counts."""
    card = Card(5000)
    memory = BuildMemory(card.read)
    for takes in (900, odd, 100, 100):
        built(memory, card, takes=takes, beside=True)

    assert_need(memory, card, 100)


def test_a_build_after_a_loss_says_nothing_about_the_need() -> None:
    """The groups that were lost are freed meanwhile."""
    card = Card(5000)
    memory = BuildMemory(card.read)
    for takes in (400, 10, 10, 10):
        built(memory, card, takes=takes, beside=False)
    card.free = 300

    with pytest.raises(RuntimeError, match="a second set"):
        memory.check("g", GPU)


def test_what_training_frees_meanwhile_hides_no_need() -> None:
    card = Card(1000)
    memory = BuildMemory(card.read)
    built(memory, card, takes=400, beside=False)
    built(memory, card, takes=-100, beside=True)
    card.free = 300

    with pytest.raises(RuntimeError, match="a second set"):
        built(memory, card, takes=400, beside=True)


def test_a_build_that_fails_says_nothing_about_its_need() -> None:
    card = Card(1000)
    memory = BuildMemory(card.read)
    with pytest.raises(ValueError, match="no peer"):
        fail(memory, card, takes=900)
    built(memory, card, takes=10, beside=True)

    assert card.free == 90

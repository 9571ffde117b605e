"""Changes to a piece of state after its copy follow as gradients: no bit is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from tests.trainer.scripts import (
    Build,
    Forked,
    Optimize,
    Scheduled,
    Script,
    frozen,
    matrices,
    mlp,
    normed,
)
from tests.trainer.tailing import pair
from tmd.trainer.protocol.frames import Boundary, DigestCheck

pytestmark = pytest.mark.timeout(60)


def one(make: Callable[..., Optimizer], **options: object) -> Optimize:
    return lambda model: [make(model.parameters(), **{"lr": 0.01, **options})]


OPTIMIZERS: dict[str, tuple[Optimize, Build]] = {
    "AdamW": (one(optim.AdamW), mlp),
    "AdamW foreach": (one(optim.AdamW, foreach=True), mlp),
    "AdamW fused": (one(optim.AdamW, fused=True), mlp),
    "AdamW amsgrad": (one(optim.AdamW, amsgrad=True), mlp),
    "AdamW fused amsgrad": (one(optim.AdamW, fused=True, amsgrad=True), mlp),
    "Adam": (one(optim.Adam, weight_decay=0.1), mlp),
    "SGD": (one(optim.SGD), mlp),
    "SGD momentum": (one(optim.SGD, momentum=0.9, weight_decay=0.1), mlp),
    "SGD nesterov": (one(optim.SGD, momentum=0.9, nesterov=True), mlp),
    "SGD fused": (one(optim.SGD, momentum=0.9, fused=True), mlp),
    "Adagrad": (one(optim.Adagrad, lr_decay=0.01), mlp),
    "Adagrad fused": (one(optim.Adagrad, fused=True), mlp),
    "RMSprop": (one(optim.RMSprop, momentum=0.9, centered=True), mlp),
    "NAdam": (one(optim.NAdam), mlp),
    "RAdam": (one(optim.RAdam), mlp),
    "Adadelta": (one(optim.Adadelta), mlp),
    "Adamax": (one(optim.Adamax), mlp),
    "Adafactor": (one(optim.Adafactor), mlp),
    "Muon": (one(optim.Muon), matrices),
    "Rprop": (one(optim.Rprop), mlp),
    "ASGD": (one(optim.ASGD, t0=3), mlp),
}


def two(model: nn.Module) -> list[Optimizer]:
    first, second = model.get_submodule("0"), model.get_submodule("2")
    return [
        optim.AdamW(second.parameters(), lr=0.01),
        optim.SGD(first.parameters(), lr=0.01, momentum=0.9),
    ]


def trained_only(model: nn.Module) -> list[Optimizer]:
    return [optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)]


SCRIPTS: dict[str, Callable[[int], Script]] = {
    **{name: partial(Script, optimize=o, build=b) for name, (o, b) in OPTIMIZERS.items()},
    "two optimizers": lambda s: Script(s, two),
    "groups and a scheduler": Scheduled,
    "rate in a tensor": lambda s: Scheduled(s, torch.tensor(0.01)),
    "frozen parameter in the optimizer": lambda s: Script(s, build=frozen),
    "frozen parameter outside": lambda s: Script(s, trained_only, frozen),
    "gradients that are missing": Forked,
    "missing and with momentum": lambda s: Forked(s, one(optim.SGD, momentum=0.9)),
    "buffers that forward changes": lambda s: Script(s, build=normed),
}


@pytest.mark.parametrize("make", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_copy_and_tail_lead_to_the_same_bits(make: Callable[[int], Script]) -> None:
    """The state has pieces of many ages, and later the joiner falls behind and jumps. Each time it
    reaches the state of the source, and keeps it with its own steps."""
    with pair(make) as p:
        p.meet()
        p.together(3)
        copied = p.joiner.following.tails
        p.fall_behind(3)
        p.prove()
        p.source.commit()
        p.together(2)

        p.assert_equal()
        assert p.joiner.following.note == ""
        assert copied >= len(p.source.units) - 1
        assert p.joiner.following.tails == copied + 3 * len(p.source.units.optimizers)
        assert p.joiner.computed == 7


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "groups and a scheduler", "Adagrad"])
def test_a_job_without_a_step_can_be_shadowed(name: str) -> None:
    """State of the joiner's optimizer from its own steps is removed."""
    with pair(SCRIPTS[name], trained=0) as p:
        p.meet()
        p.together(2)

        p.assert_equal()


def test_the_joiner_keeps_its_memory() -> None:
    """State of the same shape replaces the joiner's in place: nothing is allocated."""
    with pair(SCRIPTS["AdamW"]) as p:
        before = [t.data_ptr() for t in p.joiner.script.registry().collect()[1]]
        p.meet()
        p.together(2)

        assert [t.data_ptr() for t in p.joiner.script.registry().collect()[1]] == before


def test_in_step_only_after_a_step_of_its_own() -> None:
    """A copied state proves nothing about the joiner's processor, nor does a jump."""
    with pair(SCRIPTS["AdamW"]) as p:
        p.meet()
        p.together(1)
        following = p.joiner.following
        copied = following.in_step
        p.together(1)
        computed = following.in_step
        p.fall_behind(2)
        p.prove()
        jumped = following.in_step
        p.source.commit()
        p.together(1)

        assert (copied, computed, jumped, following.in_step) == (False, True, False, True)


def test_no_shadow_begins_while_outputs_are_in_flight() -> None:
    """They would be taken for outputs of the step, and the joiner would seem to compute wrongly."""
    with pair(SCRIPTS["AdamW"]) as p:
        p.meet()
        p.together(2)
        p.source.quiet = False
        p.fall_behind(3)
        busy = p.source.step
        p.source.commit()
        p.source.quiet = True
        p.together(2)

        p.assert_equal()
        assert busy not in p.joiner.pictures
        assert busy + 1 in p.joiner.pictures


def test_a_step_without_an_optimizer_is_no_step_of_its_own() -> None:
    """Nothing is computed there, so equal bits prove nothing about the joiner's processor."""
    with pair(SCRIPTS["AdamW"]) as p:
        following = p.joiner.following
        p.joiner.trains = False
        p.meet()
        p.together(2)
        ended = following.in_step
        p.joiner.trains = True
        p.together(2)

        assert (ended, following.in_step) == (False, True)


def test_a_settled_joiner_gets_only_outputs() -> None:
    """Gradients cost the source as much as the outputs: they end once no joiner needs them."""
    with pair(SCRIPTS["AdamW"]) as p:
        p.meet()
        p.together(2)
        following = p.joiner.following
        following.settle()
        while following.boundaries[-1].rest is not None:
            p.together(1)
        del following.received[:]
        p.together(3)

        assert {type(frame) for frame in following.received} == {Boundary, DigestCheck}
        p.assert_equal()

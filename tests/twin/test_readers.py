"""Threads that copy or digest a script's state beside training are ordered with its streams.

The script here never waits for its device, like one that reads no loss.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.twin.device import Twin
from tmd.trainer.checkpoints.naming import Names
from tmd.trainer.checkpoints.staging import StagedState
from tmd.trainer.protocol.frames import Unit
from tmd.trainer.protocol.outbox import Outbox
from tmd.trainer.session.optimizers import OptimizerHooks, Stage
from tmd.trainer.state.data import Position
from tmd.trainer.state.replicas import all_different
from tmd.trainer.state.state import Registry
from tmd.trainer.state.units import Units
from tmd.trainer.state.window import Window
from tmd.trainer.state_transfer.early_digest import EarlyDigest

STEP = 3


class Script:
    """A model that trains in a stream of its own."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.registry = Registry({"model": self.model, "optimizer": self.optimizer})
        self.units = Units(self.registry)
        self.train()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).square().sum().backward()
        self.optimizer.step()


def checkpoint(script: Script) -> Callable[[], object]:
    """Copies units for a checkpoint."""
    names = Names(script.registry, all_different(1))
    staged = StagedState(names, 0, STEP, Position(0, STEP), 7)

    def finish() -> None:
        staged.finish()
        assert staged.broken is None

    return finish


def digest(script: Script) -> Callable[[], object]:
    """Computes the digest that is compared after a loss."""
    early = EarlyDigest(script.units)
    early.stand(STEP)
    return lambda: early.of(STEP)()


def snapshot(script: Script) -> Callable[[], object]:
    """Copies units for a shadow or a snapshot."""
    window, outbox = Window(lambda: script.units.params), Outbox(1 << 20)
    window.open(STEP)

    def copy() -> None:
        for number in range(len(script.units)):
            with window.reading() as version:
                assert version == STEP
                layout, tensors = script.units.collect(number)
                assert outbox.copy(Unit(version, number, layout), tensors) is not None

    return copy


READERS = [checkpoint, digest, snapshot]
Reader = Callable[[Script], Callable[[], object]]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("ordered", [True, False])
def test_a_step_may_run_in_a_stream_of_its_own(reader: Reader, ordered: bool) -> None:
    """The boundary is in the default stream, which the session lets wait for the optimizer's."""
    twin = Twin()
    with twin.installed(), twin.training():
        with twin.stream("training"):
            script = Script()
        hooks = OptimizerHooks(
            vote=lambda: None,
            applying=lambda _: None,
            calls=lambda: 0,
            stage=lambda: Stage.COMPUTING,
        )
        hooks.attach([script.optimizer], [script.optimizer], [])
        with twin.stream("training"):
            script.train()
        if ordered:
            hooks.precede()
        with ThreadPoolExecutor(1) as beside:
            beside.submit(reader(script)).result()

    assert (twin.recorder.races == []) is ordered


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_beside_training_is_ordered_with_it(reader: Reader) -> None:
    twin = Twin()
    with twin.installed(), twin.training(), twin.stream("training"):
        script = Script()
        act, before = reader(script), twin.recorder.ordered
        with ThreadPoolExecutor(1) as beside:
            beside.submit(act).result()
        read = twin.recorder.ordered - before
        script.train()

    assert twin.recorder.races == []
    assert read > 0, "it read nothing that training had changed"
    assert twin.recorder.ordered > before + read, "training did not change what it had read"

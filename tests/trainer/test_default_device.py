"""A script may call ``torch.set_default_device("cuda")``; "meta" stands in for it here.

tmd's own memory stays in host memory, also where tmd runs in the script's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tests.trainer.moves import Worker, moved
from tests.trainer.test_archive import Stage, gone_on, saved
from tests.trainer.wire import linked
from tmd.fabric import device
from tmd.fabric.collectives.op import Op
from tmd.fabric.frame import FrameKind
from tmd.fabric.kept_calls import CollectiveCall, KeptInputs, MemoryPool
from tmd.fabric.memory import KEPT, Scratch
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.outbox import Outbox
from tmd.trainer.state.layout import flatten
from tmd.trainer.state.step_sampler import StepSampler
from tmd.trainer.state.units import whole_digest

pytestmark = pytest.mark.timeout(60)

BYTE = torch.uint8


@contextmanager
def elsewhere() -> Iterator[None]:
    """Within the context the script's tensors are made on another device."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def repeated() -> Tensor:
    """The output of an operation that was run again for other ranks."""
    made: list[Tensor] = []

    def body(op: Op, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        made.append(outputs[0].fill_(1))

    inputs, outputs = [torch.ones(3, device="cpu")], [torch.ones(3, device="cpu")]
    kept = KeptInputs(
        CollectiveCall(FrameKind.BARRIER, body, outputs, inputs), inputs, MemoryPool(1 << 20)
    )
    kept.completed()
    assert kept.repeat_for_others(None)  # type: ignore[arg-type]
    return made[0]


BYTES = torch.ones(3, dtype=BYTE, device="cpu")
MEMORY: dict[str, Callable[[], Tensor]] = {
    "of the host": lambda: device.current().host_memory((3,), BYTE),
    "scratch": lambda: Scratch().take(3, BYTE),
    "much scratch": lambda: Scratch().take(KEPT + 1, BYTE),
    "for copies": lambda: MemoryPool(1 << 20).copies([BYTES])[1],
    "of an output": repeated,
}


@pytest.mark.parametrize("take", MEMORY.values(), ids=MEMORY.keys())
def test_memory_is_that_of_the_host(take: Callable[[], Tensor]) -> None:
    with elsewhere():
        assert take().device.type == "cpu"


def test_a_frame_comes_to_host_memory() -> None:
    value = torch.arange(4.0)
    layout, tensors = flatten([value])
    with elsewhere():
        entry = Outbox(1 << 20).copy(frames.Unit(0, 0, layout), tensors)
        assert entry is not None
        with linked() as (near, far):
            frames.send(near, *entry)
            _, (arrived,) = frames.receive(far)

    assert torch.equal(arrived, value)


def test_a_whole_state_comes_to_its_place() -> None:
    """Also that of an optimizer which has none yet."""
    workers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        optimizer = AdamW(model.parameters())
        workers.append(Worker(model, optimizer=optimizer))
        if seed == 1:
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
    with elsewhere():
        moved(*workers)

    assert whole_digest(workers[0].context.units, 4) == whole_digest(workers[1].context.units, 4)


def test_the_order_of_the_batches_is_drawn_as_ever() -> None:
    """Its generator is on the host."""
    sampler = StepSampler(32, 4, 3, lambda: (0, 1))
    before = list(sampler)
    with elsewhere():
        assert list(sampler) == before


def test_a_checkpoint_is_read(tmp_path: Path) -> None:
    before, after = Stage("a", 1).train(), Stage("a", 2)
    reading = saved(tmp_path, [before])
    with elsewhere():
        gone_on(reading, [after])

    assert after.layer("a") == before.layer("a")

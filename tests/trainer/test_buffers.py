"""Buffers are compared and copied with few waits for a device."""

from __future__ import annotations

import pytest
import torch
from msgspec import msgpack
from torch import nn

from tests.twin.device import Twin
from tmd.trainer.state.buffers import bytes_of, differing
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.state import Registry


class Counting(nn.Module):
    """A layer with ``many`` buffers, of which a forward changes one."""

    def __init__(self, many: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        for number in range(many):
            self.register_buffer(f"b{number}", torch.full((3,), float(number)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("b1").add_(1)
        return x * self.weight


def stepped(twin: Twin, many: int) -> tuple[int, dict[str, bytes]]:
    """One step; how often its thread waited, and what it gave to its neighbours."""
    model, given = Counting(many), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalState(Registry({"model": model, "optimizer": optimizer}))
    before = twin.recorder.waits
    local.begin()
    model(torch.ones(2)).sum().backward()
    local.exchange_copies(0, 0, 2, lambda blob, offset: given.append(blob) or b"")
    return twin.recorder.waits - before, msgpack.decode(given[0], type=dict[str, bytes])


@pytest.mark.parametrize("many", [2, 40])
def test_a_step_waits_twice_however_many_buffers_there_are(many: int) -> None:
    """Once to see which have changed, once to copy those."""
    twin = Twin()
    with twin.installed(), twin.training():
        waits, given = stepped(twin, many)

    assert waits == 2
    assert given == {"0.b1": torch.full((3,), 2.0).numpy().tobytes()}


@pytest.mark.parametrize("on_device", [True, False])
def test_what_differs_is_named(on_device: bool) -> None:
    twin = Twin()
    with twin.installed(), twin.training():
        before = {
            "same": torch.ones(3),
            "value": torch.ones(3),
            "shape": torch.ones(1),
            "dtype": torch.ones(2),
            "nan": torch.full((1,), torch.nan),
        }
        now = {
            **before,
            "value": torch.zeros(3),
            "shape": torch.ones(3),
            "dtype": torch.ones(2).int(),
        }
        if not on_device:
            twin.forget()

        found = differing(before, now)

    assert found == {"value", "shape", "dtype", "nan"}


@pytest.mark.parametrize("on_device", [True, False])
def test_the_bytes_of_each_tensor_are_its_own(on_device: bool) -> None:
    twin = Twin()
    with twin.installed(), twin.training():
        tensors = {
            "matrix": torch.arange(6.0).view(2, 3).t(),
            "flag": torch.tensor(True),
            "half": torch.arange(3, dtype=torch.bfloat16)[1:],
        }
        if not on_device:
            twin.forget()
        found = bytes_of(tensors)

    expected = {
        name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, t in tensors.items()
    }
    assert found == expected
    assert list(found) == list(tensors)

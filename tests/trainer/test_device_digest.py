"""The digest that is computed where a tensor is."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.twin.device import Twin
from tmd.trainer.state import device_digest as module
from tmd.trainer.state.device_digest import SEED, SUMS, WORDS, digest_from, sums_of
from tmd.trainer.state.digests import raw
from tmd.trainer.state.state import Registry
from tmd.trainer.state.units import Units, whole_digest

GOLDEN_SMALL = "0c00000000000000effa9f6b3068e95b5f0b37f9d3725a19"
GOLDEN_LARGE = "0c00200000000000d3da8901043e93d9d72181ccef6a6cab"
LARGE = 200
"""Rows and columns of a matrix that is worth a digest of the device's own."""


def device_digest(tensor: Tensor) -> bytes:
    return digest_from(tensor, raw(sums_of(tensor)))


def factors() -> numpy.ndarray:
    """Shape (SUMS, 1 + WORDS), uint64."""
    drawn = numpy.random.PCG64(SEED).random_raw(SUMS * (1 + WORDS)).reshape(SUMS, 1 + WORDS)
    drawn |= numpy.uint64(1)
    drawn[:, 0] -= drawn[:, 0] % numpy.uint64(8)
    drawn[:, 0] += numpy.uint64(5)
    return drawn


def computed_by_numpy(raw: bytes) -> bytes:
    """The same, from its definition."""
    whole = len(raw) // 4 * 4
    words = numpy.frombuffer(raw[:whole], numpy.int32).astype(numpy.int64).view(numpy.uint64)
    rest = numpy.frombuffer(raw[whole:], numpy.uint8).astype(numpy.uint64)
    pieces = [words[n : n + WORDS] for n in range(0, len(words), WORDS)]
    found = b""
    for own in factors():
        total = numpy.zeros(1, numpy.uint64)
        for piece in (*pieces, *([rest] if len(rest) else [])):
            total = total * own[0] + (piece * own[1 : 1 + len(piece)]).sum(dtype=numpy.uint64)
        found += total.tobytes()
    return len(raw).to_bytes(8, "little") + found


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(3, 5).t(),
        torch.arange(7, dtype=torch.bfloat16)[1:],
        torch.tensor([True, False, True]),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(4, dtype=torch.complex64),
        torch.empty(0),
        torch.arange(2 * WORDS + 3, dtype=torch.int32),
    ],
    ids=[
        "matrix",
        "transposed",
        "unaligned",
        "bytes",
        "scalar",
        "complex",
        "empty",
        "three pieces",
    ],
)
def test_it_is_what_its_definition_says(tensor: Tensor) -> None:
    plain = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    assert device_digest(tensor) == computed_by_numpy(plain)


@given(st.data())
def test_a_flipped_bit_is_always_found(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40))
    tensor = torch.zeros(size, dtype=torch.uint8)
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    changed = tensor.clone()
    changed[place] = 1 << bit

    assert device_digest(changed) != device_digest(tensor)


@given(st.lists(st.integers(0, 9999), min_size=2, max_size=2, unique=True))
def test_two_signs_that_change_are_found(places: list[int]) -> None:
    """Their sum would vanish if words were as wide as the sums."""
    tensor = torch.randn(10_000)
    changed = tensor.clone()
    changed[places] = -changed[places]

    assert device_digest(changed) != device_digest(tensor)


def test_the_order_of_the_words_counts() -> None:
    one = torch.arange(3 * WORDS, dtype=torch.int32)

    assert device_digest(one.roll(WORDS)) != device_digest(one)
    assert device_digest(one.roll(1)) != device_digest(one)


def test_sizes_differ_though_all_words_are_zero() -> None:
    assert device_digest(torch.zeros(3)) != device_digest(torch.zeros(4))


def test_signs_that_flip_at_the_same_place_of_two_pieces_are_found() -> None:
    """They share the factor of their place."""
    tensor = torch.ones(70 * WORDS // 8, 8, dtype=torch.int32)
    first = device_digest(tensor)
    for apart in (1, 2, 4, 8, 16, 32, 64):
        changed = tensor.clone().view(-1)
        changed[[5, 5 + apart * WORDS]] ^= -(2**31)

        assert device_digest(changed) != first, apart


@pytest.mark.parametrize(("size", "golden"), [(3, GOLDEN_SMALL), (2 * WORDS + 3, GOLDEN_LARGE)])
def test_it_never_changes(size: int, golden: str) -> None:
    """A change needs a higher ``tmd.fabric.handshake.VERSION``: hosts of a job may differ in the
    release of tmd, and in that of numpy."""
    assert device_digest(torch.arange(size, dtype=torch.int32)).hex() == golden


def test_a_device_without_memory_leaves_the_work_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor, split, calls = torch.randn(5), torch.split, []

    def full(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return split(*args)

    expected = device_digest(tensor)
    monkeypatch.setattr(torch, "split", full)

    assert device_digest(tensor) == expected
    assert len(calls) == 2


def trained(layer: nn.Module) -> Units:
    """Units of a layer after a step of Adam, whose counters are in host memory."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(torch.ones(2, LARGE)).square().sum().backward()
    optimizer.step()
    return Units(Registry({"model": layer, "optimizer": optimizer}))


def test_of_a_state_on_a_device_few_bytes_come_to_host_memory() -> None:
    twin = Twin()
    with twin.installed(), twin.training():
        layer = nn.Linear(LARGE, LARGE)
        units = trained(layer)
        whole_digest(units, 1)  # page-locks memory that is used again
        before, digest = twin.staged_bytes, whole_digest(units, 1)
        staged = twin.staged_bytes - before
        with torch.no_grad():
            layer.weight[0, 0] += 1.0
        changed = whole_digest(units, 1)

    weights, biases, steps = 3 * 8 * SUMS, 3 * 4 * LARGE, 2 * 4
    assert weights + biases <= staged <= weights + biases + steps
    assert digest != changed
    assert twin.recorder.races == []


def test_it_does_not_matter_where_an_optimizer_keeps_its_counters() -> None:
    """The joiner of a job may have copied them to the device."""
    twin = Twin()
    with twin.installed(), twin.training():
        torch.manual_seed(0)
        layer = nn.Linear(LARGE, LARGE)
        units = trained(layer)
        there = whole_digest(units, 1)
        for state in units.optimizers[0].state.values():
            for name in ("step", "exp_avg"):
                twin.move_to_host(state[name])
        here = whole_digest(units, 1)

    assert here == there


def test_its_factors_are_made_once_for_each_device() -> None:
    module._factors.cache_clear()
    for _ in range(3):
        device_digest(torch.ones(4))

    assert module._factors.cache_info().misses == 1

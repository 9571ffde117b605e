"""The digest that is computed where a tensor is."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.twin.device import Twin
from tmd.trainer.state import device_digest as module
from tmd.trainer.state.device_digest import SEED, SUMS, WORDS, device_digest
from tmd.trainer.state.state import Registry
from tmd.trainer.state.units import Units, whole_digest

DRAWN = numpy.random.PCG64(SEED).random_raw(SUMS * (1 + WORDS)) | numpy.uint64(1)


def computed_by_numpy(raw: bytes) -> bytes:
    """The same, from its definition."""
    whole = len(raw) // 4 * 4
    words = numpy.frombuffer(raw[:whole], numpy.int32).astype(numpy.int64).view(numpy.uint64)
    rest = numpy.frombuffer(raw[whole:], numpy.uint8).astype(numpy.uint64)
    pieces = [words[n : n + WORDS] for n in range(0, len(words), WORDS)] or [words]
    found = []
    for first, *_ in factors():
        total = numpy.zeros(1, numpy.uint64)
        own = factors()[len(found)][1:]
        for piece in (*pieces, rest):
            total = total * first + (piece * own[: len(piece)]).sum(dtype=numpy.uint64)
        found.append(total)
    return len(raw).to_bytes(8, "little") + numpy.concatenate(found).tobytes()


def factors() -> numpy.ndarray:
    return DRAWN.reshape(SUMS, 1 + WORDS)


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
def test_it_is_the_sum_of_all_words_each_times_the_factor_of_its_place(tensor: Tensor) -> None:
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


def test_the_digest_of_a_state_on_a_device_needs_no_copy_of_it_in_host_memory() -> None:
    twin = Twin()
    with twin.installed(), twin.training():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        units = Units(Registry({"model": model, "optimizer": optimizer}))
        held = [twin.holds(p) for p in units.params]
        before, digest = twin.staged, whole_digest(units, 1)
        staged = twin.staged - before
        with torch.no_grad():
            model.weight[0, 0] += 1.0
        changed = whole_digest(units, 1)

    assert held == [True, True]
    assert staged == 0
    assert digest != changed
    assert twin.recorder.races == []


def test_its_factors_are_made_once_for_each_device() -> None:
    module._factors.cache_clear()
    for _ in range(3):
        device_digest(torch.ones(4))

    assert module._factors.cache_info().misses == 1

"""Digests of two states are paired by step, and what differs first is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tmd.trainer.shadow.comparison import DigestComparison
from tmd.trainer.state.state import Registry
from tmd.trainer.state.units import BUFFERS, UNITS, Units, whole_digest


def state() -> tuple[nn.Module, Units]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    return net, Units(Registry({"model": net, "optimizer": optimizer}))


@pytest.mark.parametrize("ours_first", [True, False])
def test_equal_states_are_verified_whichever_digest_comes_first(ours_first: bool) -> None:
    found = DigestComparison()
    (_, here), (_, there) = state(), state()
    add = [(found.ours, here), (found.theirs, there)]
    for each, units in add if ours_first else add[::-1]:
        assert each(7, whole_digest(units, 7)) == []
    assert found.verified == 7
    assert found.first_unit is None


@pytest.mark.parametrize("name", ["0.weight", "1.bias", "2.weight"])
def test_the_first_parameter_that_differs_is_named(name: str) -> None:
    """Though all that follow differ in the digest, too."""
    found = DigestComparison()
    (_, here), (net, there) = state(), state()
    with torch.no_grad():
        net.get_parameter(name).view(-1)[0].add_(1e-7)
        net.get_parameter("2.bias").view(-1)[0].add_(1e-7)
    found.ours(3, whole_digest(here, 3))
    assert found.theirs(3, whole_digest(there, 3)) == [UNITS]
    assert found.verified is None
    assert found.first_unit is not None
    assert here.name(found.first_unit) == name


def test_no_parameter_is_named_if_only_buffers_differ() -> None:
    found = DigestComparison()
    (_, here), (net, there) = state(), state()
    net.get_buffer("1.running_mean").add_(1)
    found.ours(3, whole_digest(here, 3))
    assert found.theirs(3, whole_digest(there, 3)) == [BUFFERS]
    assert found.first_unit is None


def test_a_later_digest_is_no_answer_to_an_earlier_one() -> None:
    found = DigestComparison()
    _, units = state()
    found.ours(3, whole_digest(units, 3))
    assert found.theirs(4, {}) == []
    assert found.verified is None

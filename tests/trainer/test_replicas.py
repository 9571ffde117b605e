"""Which ranks hold equal state: what is not known to be replicated exists once."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tmd.trainer.state.replicas import (
    all_alike,
    all_different,
    checked,
    common,
    group_of,
    read_off,
    replicas_along,
)

GRID = SimpleNamespace(mesh=torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("replicate", "shard"))
"""Stands for a 2 x 2 DeviceMesh, which cannot be made without a process group."""


class Placement:
    def __init__(self, replicate: bool) -> None:
        self._replicate = replicate

    def is_replicate(self) -> bool:
        return self._replicate


def spread(*replicate: bool) -> nn.Module:
    """A module with one parameter on the grid, replicated along the dimensions that are true."""
    module = nn.Module()
    param = nn.Parameter(torch.zeros(2))
    param.device_mesh = GRID  # type: ignore[attr-defined]
    param.placements = tuple(Placement(r) for r in replicate)  # type: ignore[attr-defined]
    module.weight = param
    return module


def test_dtensors_are_replicas_along_the_dimensions_that_say_so() -> None:
    """FSDP2 on one dimension, HSDP, tensor parallel without and with replicas."""
    assert read_off([spread(False, False)], 4) == all_different(4)
    assert read_off([spread(True, False)], 4) == ((0, 2), (1, 3))
    assert read_off([spread(False, True)], 4) == ((0, 1), (2, 3))
    assert read_off([spread(True, True)], 4) == all_alike(4)


def test_several_modules_have_in_common_what_all_of_them_have() -> None:
    found = read_off([spread(True, False), spread(False, True)], 4)

    assert found == all_different(4)


def test_a_bare_module_is_a_ranks_own_unless_nothing_in_it_is_trained() -> None:
    """A frozen teacher beside a replicated model takes nothing away."""
    teacher = nn.Linear(2, 2).requires_grad_(False)

    assert read_off([nn.Linear(2, 2)], 2) == all_different(2)
    assert read_off([teacher], 2) == all_alike(2)


def test_a_script_may_tell_and_is_checked() -> None:
    assert checked([[3, 1], [0, 2]], 4) == ((0, 2), (1, 3))
    assert replicas_along(GRID, "shard") == ((0, 1), (2, 3))
    assert replicas_along(GRID, "replicate", "shard") == all_alike(4)
    with pytest.raises(ValueError, match=r"each rank of 0\.\.3 exactly once"):
        checked([[0, 1], [1, 2, 3]], 4)
    with pytest.raises(ValueError, match="no dimension dp"):
        replicas_along(GRID, "dp")


def test_groups() -> None:
    assert common(((0, 1), (2, 3)), ((0, 1, 2), (3,))) == ((0, 1), (2,), (3,))
    assert group_of(((0, 2), (1, 3)), 3) == (1, 3)

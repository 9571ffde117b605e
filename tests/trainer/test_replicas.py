"""Which ranks hold equal state: a state not known to be replicated is unique."""

from collections.abc import Iterator
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tmd.torch_private.ddp import ddp_of
from tmd.trainer.state.replicas import (
    all_alike,
    all_different,
    checked,
    common,
    group_of,
    read_off,
    replicas_along,
)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A world of four without the other three ranks: nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def spread(*replicate: bool) -> nn.Module:
    """A module with one parameter on the grid, replicated along the dimensions that are true."""
    module = nn.Module()
    placements = [Replicate() if r else Shard(0) for r in replicate]
    whole = DTensor.from_local(torch.zeros(2), grid(), placements, run_check=False)
    module.weight = nn.Parameter(whole)
    return module


def test_dtensors_are_replicas_along_the_dimensions_that_say_so() -> None:
    """Sharded along both dimensions, along the second only (HSDP), the first only, neither."""
    assert read_off([spread(False, False)], 4) == all_different(4)
    assert read_off([spread(True, False)], 4) == ((0, 2), (1, 3))
    assert read_off([spread(False, True)], 4) == ((0, 1), (2, 3))
    assert read_off([spread(True, True)], 4) == all_alike(4)


def test_several_modules_share_only_common_replicas() -> None:
    found = read_off([spread(True, False), spread(False, True)], 4)

    assert found == all_different(4)


def test_a_bare_module_is_a_ranks_own_unless_nothing_in_it_is_trained() -> None:
    """A frozen teacher beside a replicated model changes nothing."""
    teacher = nn.Linear(2, 2).requires_grad_(False)

    assert read_off([nn.Linear(2, 2)], 2) == all_different(2)
    assert read_off([teacher], 2) == all_alike(2)


def test_a_declaration_of_replicas_is_checked() -> None:
    assert checked([[3, 1], [0, 2]], 4) == ((0, 2), (1, 3))
    assert replicas_along(grid(), "shard") == ((0, 1), (2, 3))
    assert replicas_along(grid(), "replicate", "shard") == all_alike(4)
    with pytest.raises(ValueError, match=r"each rank of 0\.\.3 exactly once"):
        checked([[0, 1], [1, 2, 3]], 4)
    with pytest.raises(ValueError, match="no dimension dp"):
        replicas_along(grid(), "dp")


def test_groups() -> None:
    """Ranks stay together where all partitions agree; a rank's group is the one that lists it."""
    assert common(((0, 1), (2, 3)), ((0, 1, 2), (3,))) == ((0, 1), (2,), (3,))
    assert group_of(((0, 2), (1, 3)), 3) == (1, 3)


def test_a_model_that_is_compiled_around_ddp_is_replicated_like_ddp() -> None:
    """As torch recommends it."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    compiled, bare = (
        cast("nn.Module", torch.compile(m, backend="eager")) for m in (model, nn.Linear(2, 2))
    )

    assert read_off([compiled], 4) == read_off([model], 4) == all_alike(4)
    assert ddp_of(compiled) is model
    assert ddp_of(bare) is None

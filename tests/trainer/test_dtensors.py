"""A rank's part of a distributed tensor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tmd.torch_private.fsdp import param_groups
from tmd.trainer.state.dtensors import local_part

RANK, SIZE = 1, 2


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A group of one rank, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=SIZE)
    yield
    dist.destroy_process_group()


def distributed() -> DTensor:
    """Four rows over all ranks; made without an operation, for which torch would need a compiler
    that other tests have replaced."""
    mesh = init_device_mesh("cpu", (SIZE,))
    return DTensor.from_local(torch.ones(4 // SIZE, 3), mesh, [Shard(0)], run_check=False)


def test_a_part_shares_the_memory_and_is_detached() -> None:
    spread = distributed()
    spread.requires_grad_()

    own = local_part(spread)
    own.fill_(7)

    assert not isinstance(own, DTensor)
    assert (own.shape, own.requires_grad) == ((2, 3), False)
    assert spread.to_local().tolist() == [[7.0] * 3] * 2


def test_taking_a_part_plans_no_operation_on_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planning takes milliseconds in each new thread, which would delay training."""
    spread = distributed()
    asked: list[object] = []
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name in ("propagate", "propagate_op_sharding", "propagate_op_sharding_non_cached"):
        monkeypatch.setattr(propagator, name, lambda *told: asked.append(told))
    found: list[torch.Tensor] = []

    thread = threading.Thread(target=lambda: found.append(local_part(spread)))
    thread.start()
    thread.join()

    assert len(found) == 1
    assert asked == []


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (SimpleNamespace(_fsdp_param_groups=["a", "b"], _fsdp_param_group="a"), ["a", "b"]),
        (SimpleNamespace(_fsdp_param_group="a"), ["a"]),
        (SimpleNamespace(_fsdp_param_group=None), []),
    ],
    ids=["several", "one", "none"],
)
def test_param_groups_are_found_in_every_version_of_torch(
    state: SimpleNamespace, found: list[str]
) -> None:
    """A group that is not found would keep the gathered parameters of a broken step."""
    assert param_groups(state) == found

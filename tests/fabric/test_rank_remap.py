"""torch's cached coordinates in a mesh, after the process has taken another rank."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fabric.circle import KEY
from tests.fabric.pool import pool
from tmd.fabric import Fabric, Neutral, rank_remap
from tmd.torch_private import meshes

pytestmark = pytest.mark.timeout(60)

PARTS = {6: (3, 3), 5: (3, 2)}
"""Sizes of tensors sharded over two ranks, and those of their parts."""


def become_another(_rank: int, _size: int, _store: dist.Store, whole: int) -> list[list[object]]:
    """Run an operation as rank 0, then as rank 1: each time its part's shape, its coordinate, and
    whether that was recomputed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from tmd.fabric import install

    fabric = Fabric("standby", KEY)
    fabric.sandbox(Neutral(), 0, 2)
    install(fabric)
    dist.init_process_group("tmd")
    mesh = init_device_mesh("cpu", (2,))
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    made, real = [], propagator.propagate_op_sharding_non_cached

    def counted(*args: object) -> object:
        made.append(args)
        return real(*args)

    propagator.propagate_op_sharding_non_cached = counted
    propagator.propagate_op_sharding = type(propagator.propagate_op_sharding)(counted)

    def part() -> list[object]:
        made.clear()
        local = torch.ones(PARTS[whole][dist.get_rank()], 4)
        tensor = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((whole, 4)), stride=(4, 1)
        )
        other: Any = tensor.new_zeros((whole, 4)) + tensor.view(whole, 2, 2).flatten(1)
        return [tuple(other.to_local().shape), tuple(mesh.get_coordinate() or ()), bool(made)]

    first = part()
    fabric.sandbox(Neutral(), 1, 2)
    found = [first, part()]
    dist.destroy_process_group()
    fabric.close()
    return found


@pytest.mark.parametrize(
    ("whole", "afterwards"), [(6, [(3, 4), (1,), False]), (5, [(2, 4), (1,), True])]
)
def test_only_parts_of_other_shapes_are_recomputed(
    tmp_path: Path, whole: int, afterwards: list[object]
) -> None:
    """A cached shape of another rank's part would be wrong; that of an equal part is right."""
    with pool(1, str(tmp_path / "store")) as p:
        (found,) = p.run(become_another, whole)

    assert found == [[(3, 4), (0,), True], afterwards]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_scan_done_ahead_is_not_repeated_while_others_wait(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Until an operation has run since."""
    looked = []
    scan = rank_remap.Scan(lambda: looked.append(True) or True)
    scan.meshes = True
    specs = ModuleType(meshes.SPEC)
    vars(specs)["DTensorSpec"] = type("DTensorSpec", (), {})
    monkeypatch.setitem(sys.modules, meshes.SPEC, specs)
    if ahead:
        rank_remap.look_ahead(7, scan)
        rank_remap.look_ahead(7, scan)
    before = len(looked)
    rank_remap.turn([], moved=True, ran=7, scan=scan)
    at_turn = len(looked) - before
    rank_remap.turn([], moved=True, ran=8, scan=scan)

    assert (before, at_turn, len(looked)) == ((1, 0, 2) if ahead else (0, 1, 2))

"""Finds the ranks that hold equal state, from the registered objects or the script's declaration.

The result is a partition of the ranks, the same on every worker. A state that is not known to be
replicated counts as unique: a lost rank is then never restored from another rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

from tmd.torch_private.ddp import ddp_of
from tmd.trainer.state.divided import ranks_of
from tmd.trainer.state.dtensors import is_spread

Partition = tuple[tuple[int, ...], ...]
"""Groups of ranks with equal state, each in order; every rank is in exactly one group."""


def all_alike(size: int) -> Partition:
    """Every rank is a replica of every other one."""
    return (tuple(range(size)),)


def all_different(size: int) -> Partition:
    """The state of every rank is unique."""
    return tuple((rank,) for rank in range(size))


def replicas_along(mesh: Any, *dims: str) -> Partition:
    """Ranks that differ only along the dimensions ``dims`` of a ``DeviceMesh``.

    For ``session.register(..., replicas=replicas_along(mesh, "dp"))``.

    Raises:
        ValueError: the mesh has no such dimension.
    """
    names = tuple(mesh.mesh_dim_names or ())
    if unknown := [d for d in dims if d not in names]:
        raise ValueError(f"the mesh has no dimension {', '.join(unknown)}; it has {names}")
    return _along(mesh, [names.index(d) for d in dims])


def partition(
    models: Sequence[nn.Module],
    declared: Iterable[Iterable[int]] | None,
    size: int,
    divided: Sequence[Any] = (),
) -> Partition:
    """The partition that a script declares, or else the one that :func:`read_off` finds.

    With an optimizer that is ``divided`` among ranks every state is unique: DDP makes only the
    parameters equal, and this process does not know the groups of other ranks.

    Raises:
        ValueError: the declaration does not name every rank exactly once, or calls ranks equal
            that divide an optimizer among them.
    """
    if declared is None:
        return all_different(size) if divided else read_off(models, size)
    groups = checked(declared, size)
    for ranks in map(ranks_of, divided):
        if unequal := [group for group in groups if len(ranks.intersection(group)) > 1]:
            raise ValueError(
                f"register(replicas=...): ranks {unequal[0]} are not equal, since a "
                f"ZeroRedundancyOptimizer is divided among {sorted(ranks)}"
            )
    return groups


def read_off(models: Sequence[nn.Module], size: int) -> Partition:
    """The partition that follows from how ``models`` are wrapped.

    DDP replicates over its group, DTensors (FSDP2, HSDP, tensor parallel) over the dimensions of
    their mesh on which they are ``Replicate``. A bare module with trainable parameters counts as
    unique to this rank.
    """
    parts = [part for model in models for part in _of_module(model, size)]
    return reduce(common, parts, all_alike(size))


def checked(declared: Iterable[Iterable[int]], size: int) -> Partition:
    """The partition that a script declares.

    Raises:
        ValueError: it does not name every rank exactly once.
    """
    groups = tuple(sorted(tuple(sorted(group)) for group in declared))
    if sorted(rank for group in groups for rank in group) != list(range(size)):
        raise ValueError(
            f"register(replicas=...): {groups} must name each rank of 0..{size - 1} exactly once"
        )
    return groups


def common(one: Partition, other: Partition) -> Partition:
    """Groups of ranks that are together in both partitions."""
    return tuple(sorted(both for a in one for b in other if (both := _shared(a, b))))


def group_of(partition: Partition, rank: int) -> tuple[int, ...]:
    """The replicas of ``rank``, itself included."""
    return next((group for group in partition if rank in group), (rank,))


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(rank for rank in one if rank in other)


def _of_module(model: nn.Module, size: int) -> list[Partition]:
    """One partition for each way in which parameters of ``model`` are distributed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    spread: list[Any] = [p for p in trained if is_spread(p)]
    meshes = {(id(p.device_mesh), p.placements): p for p in spread}
    parts = [_of_dtensor(param, size) for param in meshes.values()]
    if (ddp := ddp_of(model)) is not None:
        parts.append(_of_group(ddp.process_group, size))
    elif len(spread) < len(trained):
        parts.append(all_different(size))
    return parts


def _of_group(group: Any, size: int) -> Partition:
    ranks = set(torch.distributed.get_process_group_ranks(group))
    alone = tuple((rank,) for rank in range(size) if rank not in ranks)
    # This process does not know other groups of replicas of the same kind.
    return tuple(sorted((tuple(sorted(ranks)), *alone)))


def _of_dtensor(param: Any, size: int) -> Partition:
    dims = [i for i, placement in enumerate(param.placements) if placement.is_replicate()]
    found = _along(param.device_mesh, dims)
    known = {rank for group in found for rank in group}
    return tuple(sorted((*found, *((r,) for r in range(size) if r not in known))))


def _along(mesh: Any, dims: Sequence[int]) -> Partition:
    ranks: torch.Tensor = mesh.mesh
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    along = (torch.arange(n, device="cpu") for n in ranks.shape)
    for place in torch.cartesian_prod(*along).reshape(-1, ranks.dim()):
        at = tuple(int(i) for i in place)
        key = tuple(i for dim, i in enumerate(at) if dim not in dims)
        groups[key].append(int(ranks[at]))
    return tuple(sorted(tuple(sorted(group)) for group in groups.values()))

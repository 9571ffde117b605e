"""All-reduce of one-dimensional tensors in place: chooses the algorithm by the size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tmd.fabric.collectives import doubling, halving
from tmd.fabric.collectives.op import Op
from tmd.fabric.collectives.parts import Parts
from tmd.fabric.memory import view
from tmd.fabric.reduction import Reduction

SMALL = 256 << 10
"""Largest size in bytes for recursive doubling. Larger tensors are reduced by halving."""


def allreduce(op: Op, flat: Tensor, reduction: Reduction, parts: Parts | None = None) -> None:
    """Reduce ``flat`` over all ranks. Both algorithms give the same bits.

    ``parts``: the parts of ``flat``, if the operation may have to be finished after a rank is
    lost. ``flat`` must then be larger than :data:`SMALL`.
    """
    if op.shares == 1 or flat.numel() == 0:
        return
    if op.size == 1:  # one worker holds all ranks
        return reduction.finish(flat, op.shares)
    if flat.nbytes > SMALL:
        return halving.allreduce(op, flat, reduction, parts)
    received = op.scratch.take(flat.numel(), flat.dtype)
    combine = reduction.combine

    def merge(lower: bool) -> None:
        if lower:
            combine(received, flat, out=flat)
        else:
            combine(flat, received, out=flat)

    doubling.recursive_doubling(op, view(flat), view(received), merge)
    reduction.finish(flat, op.shares)


@dataclass(frozen=True)
class Allreduce:
    """The collective: reduces each tensor in place."""

    reduction: Reduction

    def __call__(self, op: Op, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        for tensor in outputs:
            allreduce(op, tensor.view(-1), self.reduction)

    def in_parts(self, op: Op, parts: Parts) -> None:
        """The same for one tensor; ``parts`` record what its elements hold."""
        allreduce(op, parts.flat, self.reduction, parts)

    def has_parts(self, tensors: Sequence[Tensor]) -> bool:
        """Whether :meth:`in_parts` can be used. All ranks give the same answer.

        It cannot be used for several tensors, since they may share memory, or if a result may
        depend on where a part begins.
        """
        if len(tensors) != 1 or tensors[0].nbytes <= SMALL:
            return False
        return self.reduction.is_position_independent(tensors[0].dtype)

"""A process group that passes its collectives to the live generation of an inner group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tmd.fabric.fabric import Fabric
from tmd.fabric.generations.generation import Generation
from tmd.fabric.generations.generations import IN_USE, Generations
from tmd.fabric.generations.states import GenerationState
from tmd.fabric.group import Group
from tmd.fabric.objects import under_way
from tmd.fabric.untraced import untraced
from tmd.fabric.work import Work

PASSED = {
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce_coalesced",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "allgather",
    "allgather_coalesced": "allgather_coalesced",
    "_allgather_base": "_allgather_base",
    "all_gather_single": "_allgather_base",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "alltoall": "alltoall",
    "alltoall_base": "alltoall_base",
    "all_to_all_single": "alltoall_base",
}
"""Collective of a group -> method of a backend. All others stay with tmd's own algorithms: barriers
have no tensors, torch gives backends no public coalesced forms, and NCCL would open a communicator
for each pair of ranks when they first exchange a message."""


PARTS = (torch.int64, torch.uint8)
"""Types of the parts of an object."""


class PassingGroup(Group):
    """A :class:`Group` whose collectives an inner group carries, if it can carry their tensors.

    In the sandbox no inner group is called. Once a generation is aborted its calls complete at once
    without a result: the vote drops the step.
    """

    def __init__(
        self,
        fabric: Fabric,
        name: str,
        ranks: Sequence[int],
        generations: Generations,
        **options: Any,
    ) -> None:
        super().__init__(fabric, name, ranks, **options)
        self._generations = generations

    def _carrier(self, args: Sequence[Any]) -> Generation | None:
        """The generation that carries a call; ``None`` if tmd's own algorithms do."""
        generation = self._generations.live(self.view.name)
        first = next(_tensors(args), None)
        if generation is None or first is None or self._fabric.standing is None:
            return None
        if first.dtype in PARTS and under_way():
            # An abort would leave sizes undefined; tmd's own way makes them those of None.
            return None
        aborted = generation.state is GenerationState.ABORTED
        return generation if aborted or generation.inner.takes(first) else None

    def _pass(self, generation: Generation, name: str, args: Any, named: Any) -> Any:
        work = self._carried(generation, name, args, named)
        if work is None:
            work = Work(list(_tensors(args[:1])), self._fabric.blocked)
            work.finish()
        self._fabric.calls.ran += 1
        return self._begun(work)

    def _carried(self, generation: Generation, name: str, args: Any, named: Any) -> Any:
        """The running operation; ``None`` if a member is lost."""
        try:
            if generation.state in IN_USE:
                return getattr(generation.inner.backend, name)(*args, **named)
        except Exception as error:
            # A peer's end may show here before any link reports it. Only a mistake of the script
            # may end this process, and the other ranks must not wait for it.
            poisoned = self._fabric.poisoned
            self._fabric.poison(f"rank {self._fabric.rank} failed in {name}: {error!r}")
            lost = poisoned or isinstance(error, dist.DistError)
            if not lost and generation.state in IN_USE:
                raise
        return None


def _passing(name: str, inner: str) -> Any:
    own: Callable[..., Any] = getattr(Group, name)

    def collective(self: PassingGroup, *args: Any, **named: Any) -> Any:
        generation = self._carrier(args)
        if generation is None:
            return own(self, *args, **named)
        return self._pass(generation, inner, args, named)

    return untraced(collective)


for _name, _inner in PASSED.items():
    setattr(PassingGroup, _name, _passing(_name, _inner))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)

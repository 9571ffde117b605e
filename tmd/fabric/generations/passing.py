"""A process group that passes its collectives to the live generation of an inner group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from tmd.fabric.fabric import Fabric
from tmd.fabric.generations.generation import Generation
from tmd.fabric.generations.generations import Generations
from tmd.fabric.generations.states import GenerationState
from tmd.fabric.group import Group
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
"""Collective of a group -> method of a backend. All others, and messages, stay with tmd's own
algorithms: barriers have no tensors, and NCCL opens a communicator for each pair of ranks when they
first exchange a message."""


class PassingGroup(Group):
    """A :class:`Group` whose collectives an inner group carries, as far as it takes the tensors.

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

    def _passes(self, args: Sequence[Any]) -> Generation | None:
        """The generation that carries a call; ``None`` if tmd's own algorithms do."""
        generation = self._generations.live(self.view.name)
        if generation is None or self._fabric.standing is None:
            return None
        if generation.state is not GenerationState.LIVE:
            return generation
        first = next(_tensors(args), None)
        return generation if first is not None and generation.inner.takes(first) else None

    def _pass(self, generation: Generation, name: str, args: Any, named: Any) -> Any:
        self._fabric.calls.ran += 1
        self._fabric.calls.begin()
        try:
            if generation.state is GenerationState.LIVE:
                return getattr(generation.inner.backend, name)(*args, **named)
        except (AssertionError, RuntimeError):
            if generation.state is GenerationState.LIVE:
                raise
        work = Work(list(_tensors(args[:1])), self._fabric.blocked)
        work.finish()
        return work


def _passing(name: str, inner: str) -> Any:
    own: Callable[..., Any] = getattr(Group, name)

    def collective(self: PassingGroup, *args: Any, **named: Any) -> Any:
        generation = self._passes(args)
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

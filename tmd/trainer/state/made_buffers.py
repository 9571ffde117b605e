"""Buffers that a step makes or fills: they are gone again if it is repeated."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tmd.trainer.state.buffers import BufferSlot
from tmd.trainer.state.dtensors import local_part


class AbsentBuffers:
    """The names of buffers without a buffer, or with an empty one, when a step begins.

    ``named``: the slots of ``modules``, each with a name that no other one has.
    """

    def __init__(
        self, modules: Iterable[nn.Module], named: Iterable[tuple[str, BufferSlot]]
    ) -> None:
        found = dict(named)
        self._names = frozenset(found)
        self._owners = {id(owner) for module in modules for owner in module.modules()}
        self._none = [slot for slot in found.values() if slot.held is None]
        self._empty: list[tuple[BufferSlot, Tensor, torch.Size]] = [
            (slot, slot.held, slot.held.shape)
            for slot in found.values()
            if slot.held is not None and not local_part(slot.held).numel()
        ]

    def put_back(self, named: Iterable[tuple[str, BufferSlot]]) -> None:
        """Undo what the step has made. ``named``: the slots now. A submodule that it has made keeps
        its buffers."""
        for name, slot in list(named):
            if name not in self._names and id(slot.owner) in self._owners:
                delattr(slot.owner, slot.name)
        for slot in self._none:
            slot.owner._buffers[slot.name] = None
        for slot, held, shape in self._empty:
            slot.owner._buffers[slot.name] = held
            held.resize_(shape)

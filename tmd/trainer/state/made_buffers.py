"""Buffers that a step makes or fills: they are gone again if it is repeated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from tmd.trainer.state.buffers import BufferSlot
from tmd.trainer.state.dtensors import local_part


class AbsentBuffers:
    """The names of buffers without a buffer, or with an empty one, when a step begins.

    ``slots``: all those of ``modules``.
    """

    def __init__(self, modules: Iterable[nn.Module], slots: Sequence[BufferSlot]) -> None:
        self._known = {_place(slot) for slot in slots}
        self._owners = {id(owner): owner for module in modules for owner in module.modules()}
        self._none = [slot for slot in slots if slot.held is None]
        self._empty: list[tuple[BufferSlot, Tensor, torch.Size]] = [
            (slot, slot.held, slot.held.shape)
            for slot in slots
            if slot.held is not None and not local_part(slot.held).numel()
        ]

    def put_back(self, slots: Iterable[BufferSlot]) -> None:
        """Undo what the step has made. ``slots``: all those of the modules now. A submodule that it
        has made keeps its buffers."""
        # A module may be a part of several ones, and may have another path now.
        made = {_place(slot): slot for slot in slots if id(slot.owner) in self._owners}
        for place in made.keys() - self._known:
            delattr(made[place].owner, made[place].name)
        for slot in self._none:
            slot.owner._buffers[slot.name] = None
        for slot, held, shape in self._empty:
            slot.owner._buffers[slot.name] = held
            if held.shape != shape:
                held.resize_(shape)


def _place(slot: BufferSlot) -> tuple[int, str]:
    return id(slot.owner), slot.name

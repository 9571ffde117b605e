"""What a step changes besides the optimizer's work, and what only one rank has.

The buffers that a forward writes to (BatchNorm's statistics) serve two needs. A poisoned step must
leave no trace of them (invariant I8); and they must not be lost with their rank: before each
vote every rank lays a copy with the next two ranks, so that a committed step implies kept copies.
Random state is not here: it is derived (:mod:`tmd.trainer.state.seeds`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from msgspec import msgpack
from torch import Tensor, nn

from tmd.core.planning.failover import HOLDER_OFFSETS
from tmd.torch_private.fsdp import forget_gathered
from tmd.torch_private.modules import keeps_statistics
from tmd.trainer.state.state import Registry, Stateful

SMALL = 64 << 10
"""Bytes up to which a buffer is watched in every step; larger ones in the first two."""

Shift = Callable[[bytes, int], bytes]


class LocalState:
    """Watches the buffers of the registered modules, by name and by value.

    Whether anything is sent depends on the model alone, never on what this worker has seen change:
    workers with another past must not take part in other exchanges. What is sent does.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.exchanged: bool | None = None
        """Whether any rank has buffers; unknown, it goes by its own."""
        self._held: dict[tuple[int, int], bytes] = {}
        self.renew()

    def renew(self) -> None:
        """Other objects are registered now, or none for a while."""
        modules = self._registry.modules
        self._params = [p for m in modules for p in m.parameters()]
        self._statistics = {name for name, owner in _owners(modules) if keeps_statistics(owner)}
        self._seen: set[str] = set()
        """Buffers that were seen to change."""
        self._steps = 0
        self._saved: dict[str, Tensor] = {}
        self._values: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[Stateful, dict[str, Any]]] = []

    def begin(self) -> None:
        """Start of a step: keep what a poisoned step would spoil."""
        self._saved = {
            name: buffer.clone()
            for name, buffer in self._buffers().items()
            if self._is_watched(name, buffer)
        }
        self._values = [
            (group, {k: _copied(v) for k, v in group.items() if k != "params"})
            for optimizer in (*self._registry.optimizers, *self._registry.divided)
            for group in optimizer.param_groups
        ]
        self._states = [(o, copy.deepcopy(o.state_dict())) for o in self._registry.others]
        self._steps += 1

    def undo(self) -> None:
        """Before a poisoned step is run again: no trace, not even of what a script did after it.

        A scheduler is often stepped after the ``with`` block, which a poisoned step leaves early
        but does not skip.
        """
        forget_gathered(self._registry.modules)
        buffers = self._buffers()
        for name, saved in self._saved.items():
            buffers[name].data.copy_(saved)
        for param in self._params:
            param.grad = None
        for state, before in self._states:
            state.load_state_dict(before)
        for group, values in self._values:
            group.update(values)
        self._registry.forget_unscaled()

    def lay_away(self, step: int, rank: int, size: int, shift: Shift) -> None:
        """Before the vote of ``step``: exchange copies with the neighbours.

        Raises:
            LinkError: a neighbour is gone.
        """
        buffers = self._buffers()
        if size == 1 or not (buffers if self.exchanged is None else self.exchanged):
            return
        blob = msgpack.encode({name: _bytes(buffers[name]) for name in self._live(buffers)})
        self._held = {k: v for k, v in self._held.items() if k[1] >= step}
        for offset in HOLDER_OFFSETS:
            if offset < size:
                # Copies are of the state after `step`, so at the start of the next one.
                self._held[(rank - offset) % size, step + 1] = shift(blob, offset)

    def pass_over(self, step: int) -> None:
        """``step`` was only the end of a ``batches()`` call: copies as of it hold for the next."""
        for rank, at in [key for key in self._held if key[1] == step]:
            self._held[rank, step + 1] = self._held.pop((rank, at))

    def forget(self) -> None:
        """All go back to an earlier step: copies as of later ones are of steps to come again."""
        self._held.clear()

    @property
    def has_buffers(self) -> bool:
        """Whether there is anything that a forward could write to."""
        return bool(self._buffers())

    @property
    def is_live(self) -> bool:
        """Whether there is anything that only one rank has."""
        return bool(self._statistics or self._seen)

    def held(self, rank: int, step: int) -> bytes:
        """The copy kept for ``rank`` as of the start of ``step``; empty if there is none."""
        return self._held.get((rank, step), b"")

    def ranks_held(self, step: int) -> tuple[int, ...]:
        """Ranks of which a copy as of the start of ``step`` is kept here."""
        return tuple(sorted(rank for rank, at in self._held if at == step))

    def own(self) -> bytes:
        """A copy of the buffers that forwards write to, as they are now."""
        buffers = self._buffers()
        return msgpack.encode({name: _bytes(buffers[name]) for name in self._live(buffers)})

    def adopt(self, blob: bytes) -> None:
        """Put a copy of another rank's buffers in place."""
        if not blob:
            return
        buffers = self._buffers()
        for name, raw in msgpack.decode(blob, type=dict[str, bytes]).items():
            buffer = buffers[name]
            flat = torch.frombuffer(bytearray(raw), dtype=buffer.dtype)
            buffer.data.copy_(flat.view(buffer.shape))

    def _buffers(self) -> dict[str, Tensor]:
        """Looked up anew each time: a script may put another tensor in a buffer's place."""
        return {
            f"{number}.{name}": buffer
            for number, module in enumerate(self._registry.modules)
            for name, buffer in module.named_buffers()
            if buffer.numel()
        }

    def _is_watched(self, name: str, buffer: Tensor) -> bool:
        small = buffer.numel() * buffer.element_size() <= SMALL
        return small or self._steps < 2 or name in self._seen or name in self._statistics

    def _live(self, buffers: dict[str, Tensor]) -> list[str]:
        """Buffers that forwards write to."""
        self._seen |= {
            name
            for name, saved in self._saved.items()
            if name not in self._seen and not torch.equal(saved, buffers[name])
        }
        return sorted(self._seen | self._statistics)


def _owners(modules: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for number, module in enumerate(modules):
        for path, layer in module.named_modules():
            for name, buffer in layer.named_buffers(recurse=False):
                if buffer.numel():
                    yield f"{number}.{path}.{name}" if path else f"{number}.{name}", layer


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().data)

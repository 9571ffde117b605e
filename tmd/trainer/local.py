"""What a step changes besides the optimizer's work, and what only one rank has.

The buffers that a forward writes to (BatchNorm's statistics) serve two needs. A poisoned step must
leave no trace of them (I8); and they must not be lost with their rank: before each vote every rank
lays a copy with the next two ranks, so that a committed step implies kept copies.
Random state is not here: it is derived (:mod:`tmd.trainer.seeds`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from tmd.core.failover import HOLDER_OFFSETS
from tmd.trainer.state import Registry, Stateful

Shift = Callable[[bytes, int], bytes]


class LocalState:
    """Watches the buffers of ``modules`` by torch's own version counter: no copy if none change.

    Running statistics of norm layers count as changing always: their kernels do not count versions.
    """

    def __init__(self, registry: Registry) -> None:
        modules = registry.modules
        self._registry = registry
        self._buffers = [b for m in modules for b in m.buffers() if b.numel()]
        self._statistics = {
            id(b)
            for m in modules
            for layer in m.modules()
            if isinstance(layer, _NormBase)
            for b in layer.buffers(recurse=False)
        }
        self._born = [b._version for b in self._buffers]
        self._params = [p for m in modules for p in m.parameters()]
        self._begun = False
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._values: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[Stateful, dict[str, Any]]] = []
        self._held: dict[tuple[int, int], bytes] = {}

    def begin(self) -> None:
        """Start of a step: keep what a poisoned step would spoil."""
        # Before the first forward nobody knows which buffers change.
        candidates = self._live() if self._begun else self._buffers
        self._begun = True
        self._saved = [(b, b.clone()) for b in candidates]
        self._values = [
            (group, {k: _copied(v) for k, v in group.items() if k != "params"})
            for optimizer in self._registry.optimizers
            for group in optimizer.param_groups
        ]
        self._states = [(o, copy.deepcopy(o.state_dict())) for o in self._registry.others]

    def undo(self) -> None:
        """Before a poisoned step is run again: no trace, not even of what a script did after it.

        A scheduler is often stepped after the ``with`` block, which a poisoned step leaves early
        but does not skip.
        """
        with torch.no_grad():
            for buffer, saved in self._saved:
                buffer.copy_(saved)
        for param in self._params:
            param.grad = None
        for state, before in self._states:
            state.load_state_dict(before)
        for group, values in self._values:
            group.update(values)
        self._registry.forget_unscaled()

    def lay_away(self, step: int, rank: int, size: int, shift: Shift) -> None:
        """Before the vote of ``step``: exchange copies with the neighbours, if anything is live.

        Raises:
            LinkError: a neighbour is gone.
        """
        live = self._live()
        if not live or size == 1:
            return
        blob = b"".join(_bytes(b) for b in live)
        self._held = {k: v for k, v in self._held.items() if k[1] >= step}
        for offset in HOLDER_OFFSETS:
            if offset < size:
                # Copies are of the state after `step`, so at the start of the next one.
                self._held[(rank - offset) % size, step + 1] = shift(blob, offset)

    @property
    def is_live(self) -> bool:
        """Whether there is anything that only one rank has."""
        return bool(self._live())

    def held(self, rank: int, step: int) -> bytes:
        """The copy kept for ``rank`` as of the start of ``step``; empty if there is none."""
        return self._held.get((rank, step), b"")

    def ranks_held(self, step: int) -> tuple[int, ...]:
        """Ranks of which a copy as of the start of ``step`` is kept here."""
        return tuple(sorted(rank for rank, at in self._held if at == step))

    def adopt(self, blob: bytes) -> None:
        """Put a copy of another rank's buffers in place."""
        if not blob:
            return
        offset = 0
        view = bytearray(blob)
        with torch.no_grad():
            for buffer in self._fitting(len(blob)):
                flat = torch.frombuffer(
                    view, dtype=buffer.dtype, count=buffer.numel(), offset=offset
                )
                buffer.copy_(flat.view(buffer.shape))
                offset += buffer.numel() * buffer.element_size()

    def _live(self) -> list[Tensor]:
        """Buffers that forwards write to."""
        born = zip(self._buffers, self._born, strict=True)
        return [b for b, version in born if b._version != version or id(b) in self._statistics]

    def _fitting(self, size: int) -> list[Tensor]:
        live = self._live()
        if sum(b.numel() * b.element_size() for b in live) != size:
            raise RuntimeError("the copy of the lost rank's buffers does not fit the ones here")
        return live


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().data)

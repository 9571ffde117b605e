"""Buffers that a module makes while it trains, often in its first forward pass.

Of two workers of one job only one may have made them yet. A state that is put in place brings those
that it has, and removes the others, so that the next forward pass does what it did there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from tmd.core.values.errors import StateMismatch
from tmd.trainer.state.buffers import slots
from tmd.trainer.state.dtensors import local_part
from tmd.trainer.state.layout import Layout, Node, TensorSpec, dtype_of, spec_of

SAME = "start all workers with the same script"
"""What to do about buffers that cannot be made alike."""


class LateBuffers:
    """The buffers of ``module``, which has just been registered as ``name``."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self._first = {slot.path: slot.held is not None for slot in slots(module)}
        """All names of buffers at the registration, and whether there was a buffer."""
        self._owners = {path for path, _ in module.named_modules()}
        """Submodules at the registration. One that a forward pass makes brings its own buffers."""

    def awaited(self) -> set[str]:
        """Names of buffers that are not yet here."""
        return {slot.path for slot in slots(self._module) if slot.held is None}

    def made(self) -> list[Tensor]:
        """The buffers that are here since the registration."""
        every = slots(self._module)
        return [s.held for s in every if s.held is not None and not self._first.get(s.path)]

    def among(self, layout: Layout) -> dict[str, TensorSpec]:
        """The buffers in a layout of the module's parameters and buffers."""
        assert isinstance(layout, Node)
        params = {name for name, _ in self._module.named_parameters()}
        pairs = zip(layout.keys or (), layout.items, strict=True)
        return {
            str(name): spec
            for name, spec in pairs
            if isinstance(spec, TensorSpec) and name not in params
        }

    def settle(self, wanted: Mapping[str, TensorSpec]) -> None:
        """Have exactly the buffers ``wanted``. Those that are here keep their tensors and values if
        size and type are the same; new ones are zero.

        Raises:
            StateMismatch: a buffer cannot be made, or was here at the registration.
        """
        held = {slot.path: slot.held for slot in slots(self._module)}
        self._check(wanted, held)
        for path, buffer in list(self._module.named_buffers()):
            if path not in wanted and path.rpartition(".")[0] in self._owners:
                self._remove(buffer)
        for path, spec in wanted.items():
            if _owner(self._module, path) is None:
                continue  # a submodule that the next forward pass makes, with its buffers
            if (before := held.get(path)) is None or spec_of(local_part(before)) != spec:
                self._make(path, spec, before)

    def _check(self, wanted: Collection[str], held: Collection[str]) -> None:
        """Raises StateMismatch before anything has changed."""
        for path, _ in self._module.named_buffers():
            if path not in wanted and self._first.get(path):
                raise StateMismatch(
                    f"buffer {self._name}.{path} is here since the registration, and absent there: "
                    f"{SAME}"
                )
        for path in wanted:
            owner, name = _owner(self._module, path), path.rpartition(".")[2]
            if path not in held and owner is not None and hasattr(owner, name):
                raise StateMismatch(
                    f"buffer {self._name}.{path} is there, and cannot be made here: {SAME}"
                )

    def _remove(self, buffer: Tensor) -> None:
        for slot in list(slots(self._module)):
            if slot.held is buffer and slot.path in self._first:
                slot.owner._buffers[slot.name] = None
            elif slot.held is buffer:
                # The module asks whether it has such an attribute.
                delattr(slot.owner, slot.name)

    def _make(self, path: str, spec: TensorSpec, before: Tensor | None) -> None:
        owner, name = _owner(self._module, path), path.rpartition(".")[2]
        assert owner is not None
        same = () if before is None else (before,)
        beside = chain(same, owner.parameters(), owner.buffers(), self._module.parameters())
        place = next((tensor.device for tensor in beside), torch.device("cpu"))
        made = torch.zeros(spec.shape, dtype=dtype_of(spec), device=place)
        if name in owner._buffers:
            owner._buffers[name] = made
        else:
            # Nothing here tells whether the script keeps it in its state dict.
            owner.register_buffer(name, made, persistent=False)


def _owner(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path.rpartition(".")[0])
    except AttributeError:
        return None

"""Objects that must be loaded once the tensors of a state have arrived."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from tmd.core.values.errors import StateMismatch
from tmd.fabric import device
from tmd.trainer.state.digests import covered
from tmd.trainer.state.divided import set_values
from tmd.trainer.state.dtensors import like
from tmd.trainer.state.layout import Layout, TensorSpec, flatten, named, undivided, unflatten
from tmd.trainer.state.optimizer_state import all_beside, params_of, spread

Contents = dict[str, tuple[TensorSpec, str]]
"""Tensors by path: type, and digest of the values."""


class Pending:
    """Plain values, or a whole state, of the object registered as ``name``."""

    def __init__(
        self,
        name: str,
        value: Any,
        layout: Layout,
        tensors: Sequence[Tensor],
        face: torch.optim.Optimizer | None,
        *,
        fresh: bool,
    ) -> None:
        """``face``: the script's object if ``value`` is only a part of it. ``fresh``: the tensors
        are not those of ``value``, but new ones in host memory."""
        self._name, self._value, self._layout = name, value, layout
        self._tensors, self._face, self._fresh = tensors, face, fresh

    def apply(self) -> None:
        """Load it.

        Raises:
            StateMismatch: the object has other values afterwards than it was given.
        """
        if isinstance(self._value, torch.optim.Optimizer):
            _load_optimizer(self._value, self._state(self._tensors), fresh=self._fresh)
            if self._face is not None:
                set_values(self._face.param_groups, self._value.param_groups)
        elif isinstance(self._value, nn.Module):
            self._value.load_state_dict(self._state(self._tensors))
        else:
            self._load()

    def _state(self, tensors: Sequence[Tensor]) -> Any:
        return unflatten(self._layout, iter(tensors))

    def _load(self) -> None:
        """Also if all has arrived in tensors of the object: they may be copies of its own."""
        there = {
            path
            for path, tensor in zip(self._paths(self._layout), self._tensors, strict=True)
            if device.current().holds(tensor)
        }
        # Before it is loaded, which may write to these tensors.
        given = self._contents(self._layout, self._tensors, there)
        tensors = self._tensors
        if not self._fresh:
            whole = undivided(self._value.state_dict())
            tensors = [like(own, tensor) for own, tensor in zip(whole, tensors, strict=True)]
        self._value.load_state_dict(self._state(tensors))
        taken = self._contents(*flatten(self._value.state_dict(), self._name), there)
        for path, content in given.items():
            if taken.get(path) != content:
                raise StateMismatch(
                    f"{path} is not what {type(self._value).__name__}.load_state_dict() was given: "
                    "let load_state_dict() take all that state_dict() returns, or leave it out of "
                    "state_dict()"
                )

    def _paths(self, layout: Layout) -> list[str]:
        return [path for path, _ in named(layout, self._name)]

    def _contents(
        self, layout: Layout, tensors: Sequence[Tensor], there: Collection[str]
    ) -> Contents:
        """``there``: paths of tensors that came to a device."""
        found = covered(tensors, [path in there for path in self._paths(layout)])
        return {
            path: (spec, xxhash.xxh3_128_hexdigest(content))
            for (path, spec), content in zip(named(layout, self._name), found, strict=True)
        }


def _load_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], *, fresh: bool
) -> None:
    """Like ``load_state_dict`` without copies of tensors that are already in place. ``fresh`` ones
    are put on the device where the optimizer expects them; it may keep its own elsewhere."""
    params = params_of(optimizer)
    set_values(optimizer.param_groups, state["param_groups"])
    optimizer.state.clear()
    for index, values in state["state"].items():
        param = params[index] if isinstance(index, int) else None
        if param is None:  # belongs to no parameter
            optimizer.state[index] = values
        else:
            own = all_beside(optimizer, param, values, copy=False) if fresh else values
            optimizer.state[param] = spread(param, own)

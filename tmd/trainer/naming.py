"""Under which name each piece of the state is in a checkpoint, and which rank writes it.

The names are those of ``state_dict()`` below the names given to ``session.register``, so that plain
torch finds them: ``model.head.weight``, ``optimizer.state.head.weight.exp_avg``. What ranks hold
for themselves without saying so by a DTensor (a bare module) begins with ``rank<r>``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tmd.core.errors import StateMismatch
from tmd.trainer.replicas import Partition, group_of
from tmd.trainer.state import Registry
from tmd.trainer.units import Units

Path = tuple[str, ...]
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""
OWN = "tmd"
"""Begins what only this package reads."""


class Names:
    """Of what is registered; ``alike`` are the ranks of equal state, of which the first writes."""

    def __init__(self, registry: Registry, units: Units, alike: Partition) -> None:
        self._registry, self._units, self._alike = registry, units, alike
        found: dict[int, list[Path]] = {id(p): [] for p in units.params}
        for name, value in registry.named.items():
            if isinstance(value, nn.Module):
                for fqn, param in value.named_parameters(remove_duplicate=False):
                    found[id(param)].append((name, plain(fqn)))
        for number, each in enumerate(units.params):
            found[id(each)] = found[id(each)] or [("loose", str(number))]
        self._params = [found[id(p)] for p in units.params]
        self._optimizers = {
            id(o): name
            for name, o in registry.named.items()
            if isinstance(o, torch.optim.Optimizer)
        }

    def entries(self, number: int, rank: int) -> dict[Path, Tensor]:
        """What ``rank`` writes of a unit: the live tensors.

        Raises:
            StateMismatch: an optimizer spreads its state in another way than the parameter.
        """
        if group_of(self._alike, rank)[0] != rank:
            return {}
        param, keeper = self._units.params[number], self._keeper(number, rank)
        found = {(*_own(keeper), *name): param for name in self._params[number]}
        state = self._state(number)
        for key, value in self.kept(number).items():
            if not isinstance(value, Tensor):
                continue
            if _is_spread(value) and value.shape != param.shape:
                raise StateMismatch(f"{'.'.join(state)}.{key} is spread unlike its parameter")
            # A step counter is the same for all parts of a parameter.
            if keeper == rank or not _is_spread(param) or _is_spread(value):
                found[*_own(keeper), *state, key] = value
        return found

    def targets(
        self, number: int, rank: int, saved: Mapping[Path, Sequence[str]], new: Callable[..., Any]
    ) -> tuple[dict[Path, Tensor], dict[str, Tensor]]:
        """Where to read a unit into: by name in the checkpoint, and what its optimizer is to keep.

        ``saved``: what is in the checkpoint below each name; ``new``: a tensor for what is called
        so, given the parameter.
        """
        prefix, param = _own(self._keeper(number, rank)), self._units.params[number]
        state: Path = (*prefix, *self._state(number))
        kept = {key: new((*state, key), param) for key in saved.get(state, ())}
        read = {(*prefix, *self._params[number][0]): param}
        return {**read, **{(*state, key): value for key, value in kept.items()}}, kept

    def kept(self, number: int) -> dict[str, Any]:
        """What the optimizer keeps for a unit."""
        owner = self._units.owner(number)
        return {} if owner is None else owner.state.get(self._units.params[number], {})

    def besides(self) -> dict[Path, Any]:
        """All that plain torch may want besides units: live."""
        found: dict[Path, Any] = {}
        for name, value in self._registry.named.items():
            if isinstance(value, nn.Module):
                params = {fqn for fqn, _ in value.named_parameters(remove_duplicate=False)}
                for fqn, held in value.state_dict().items():
                    if fqn not in params:
                        found[name, plain(fqn)] = held
            elif isinstance(value, torch.optim.Optimizer):
                found[name, "param_groups"] = self._groups(value)
            else:
                found.update({(name, str(key)): held for key, held in value.state_dict().items()})
        return found

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        named = {id(p): n[0][1] for p, n in zip(self._units.params, self._params, strict=True)}
        return [
            {**group, "params": [named.get(id(p), "") for p in group["params"]]}
            for group in optimizer.param_groups
        ]

    def _state(self, number: int) -> Path:
        owner = self._units.owner(number)
        return (self._optimizers.get(id(owner), ""), "state", self._params[number][0][1])

    def _keeper(self, number: int, rank: int) -> int:
        """The first of all ranks that hold a part of what ``rank`` holds a part of."""
        param: Any = self._units.params[number]
        ranks = param.device_mesh.mesh.flatten().tolist() if _is_spread(param) else [rank]
        return min(group_of(self._alike, r)[0] for r in ranks)


def plain(fqn: str) -> str:
    """A name without what wrappers have put into it."""
    for wrapper in WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def _is_spread(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")


def _own(keeper: int) -> Path:
    return () if keeper == 0 else (f"rank{keeper}",)

"""Finds the stateful objects inside a framework's wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

INNER = {
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "OptimizersContainer": "optimizers",
    "LRSchedulersContainer": "schedulers",
}
"""Class of Accelerate or torchtitan -> attribute with the optimizers or schedulers that it wraps.
``AcceleratedOptimizer`` never calls ``torch.optim.Optimizer.__init__``, so it has no hooks."""


def expanded(objects: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """What keeps the state: members of lists by number, and what frameworks wrap."""
    for name, value in objects.items():
        inner = _inner(value)
        if isinstance(inner, list | tuple):
            yield from expanded({f"{name}[{i}]": item for i, item in enumerate(inner)})
        elif inner is not None:
            yield name, inner


def _inner(value: Any) -> Any:
    for kind in type(value).__mro__:
        if kind.__name__ in INNER and not kind.__module__.startswith("torch."):
            return getattr(value, INNER[kind.__name__])
    return value


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that the script built."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def refuse_hidden(name: str, module: nn.Module) -> None:
    """Refuse state that is neither parameter nor buffer: it would silently stay behind."""
    for path, each in module.named_modules():
        overridden = type(each).get_extra_state is not nn.Module.get_extra_state
        if overridden and each.get_extra_state() is not None:
            raise TypeError(
                f"register({name}=...): {type(each).__name__} at {path or 'the top'} has extra "
                "state (get_extra_state), which cannot move: keep it in buffers"
            )


class Counter:
    """A plain value of the script that moves with the rank. Made by ``session.counter``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]

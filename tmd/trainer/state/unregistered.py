"""Finds models, optimizers and schedulers that steps change though the script has not registered
them.

Such a state stays behind when a rank moves, and no comparison of registered state shows it: an
averaged copy of the weights, say, that is evaluated or saved at the end.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tmd.trainer.state.digests import digest_of
from tmd.trainer.state.dtensors import part
from tmd.trainer.state.optimizer_state import params_of
from tmd.trainer.state.state import Registry

FIRST = 1
"""Committed steps after which the objects are found."""
LOOKS = (3, 50)
"""Committed steps after which they are compared: the second for what begins to change later."""
SAMPLE = 256
"""Elements of each tensor that are compared. An average changes all of them."""

log = logging.getLogger("tmd.trainer")


class UnregisteredState:
    """Main thread only. Costs a pass over the interpreter's objects in one step of the job."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._steps = 0
        self._found: list[tuple[weakref.ref[Any], str]] = []

    def committed(self) -> str:
        """Call after each committed step. Returns what changes without being registered, in words;
        empty if nothing does, or if this is no step in which it is looked for."""
        self._steps += 1
        if self._steps != FIRST and self._steps not in LOOKS:
            return ""
        try:
            return self._begin() if self._steps == FIRST else self._compared()
        except Exception as error:
            # Any object of the script may be here, and none may stop the job.
            log.debug("unregistered state is not looked for: %s", error)
            self._found = []
            return ""

    def _begin(self) -> str:
        self._found = [(weakref.ref(each), self._content(each)) for each in self._unknown()]
        return ""

    def _compared(self) -> str:
        alive = [(each(), before) for each, before in self._found]
        changed = [o for o, before in alive if o is not None and self._content(o) != before]
        if not changed:
            return ""
        self._found = []
        optimizers = [o for o in changed if isinstance(o, Optimizer)]
        kinds = ", ".join(sorted({type(each).__name__ for each in optimizers or changed}))
        if optimizers:
            return (
                f"steps run {kinds} on parameters of the registered model, but session.register() "
                "does not know it: after a loss or a move the job trains on other numbers. Name "
                "each optimizer in register()"
            )
        return (
            f"steps change {kinds}, which session.register() does not know: it stays behind when "
            "the rank moves. If a later step or a result depends on it, name it in register()"
        )

    def _unknown(self) -> list[object]:
        """Outermost modules, optimizers, schedulers and scalers that are not registered.

        Not a generator: that would be among the objects that it holds, so that one that is not run
        to its end would keep all of them alive.
        """
        registry = self._registry
        # By memory, since a registered object may only contain the module.
        known = {_memory(t) for t in registry.collect()[1]}
        others = set(_within(registry.others))
        objects = gc.get_objects()
        modules = [o for o in objects if issubclass(type(o), nn.Module)]
        inner = {id(c) for m in modules for c in nn.Module.modules(m) if c is not m}
        found: list[object] = [
            o for o in objects if issubclass(type(o), Optimizer) and self._left_out(o)
        ]
        for module in modules:
            own = {_memory(t) for t in _tensors(module)}
            # A module without parameters, such as a metric, is no copy of a model.
            trains = next(nn.Module.parameters(module), None) is not None
            if id(module) not in inner and trains and not own & known:
                found.append(module)
        for each in objects:
            kept = issubclass(type(each), (LRScheduler, ReduceLROnPlateau, GradScaler))
            if kept and id(each) not in others:
                found.append(each)
        return found

    def _left_out(self, optimizer: Optimizer) -> list[Tensor]:
        """Parameters of the registered models that ``optimizer`` has, and no registered one."""
        registry = self._registry
        optimized = {id(p) for each in registry.faces for p in params_of(each)}
        held = {id(p) for module in registry.modules for p in module.parameters()} - optimized
        return [p for p in params_of(optimizer) if id(p) in held]

    @torch.no_grad()
    def _content(self, each: Any) -> str:
        """What a step may change of it."""
        if isinstance(each, Optimizer):
            return _sample(self._left_out(each))
        if isinstance(each, nn.Module):
            return _sample(_tensors(each))
        numbers = {k: v for k, v in each.state_dict().items() if isinstance(v, int | float)}
        return repr(sorted(numbers.items()))


def _within(objects: Iterable[object], depth: int = 3) -> Iterator[int]:
    """Identities of ``objects`` and of what they hold: one scheduler may chain others."""
    for each in objects:
        yield id(each)
        if depth and isinstance(each, list | tuple):
            yield from _within(each, depth - 1)
        elif depth and hasattr(each, "__dict__"):
            yield from _within([*vars(each).values()], depth - 1)


def _memory(tensor: Tensor) -> int:
    return part(tensor).untyped_storage().data_ptr()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from nn.Module.parameters(module)
    yield from nn.Module.buffers(module)


def _sample(tensors: Iterable[Tensor]) -> str:
    return digest_of(part(t.detach()).flatten()[:SAMPLE] for t in tensors)

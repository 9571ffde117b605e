"""Finds models, optimizers and schedulers that steps change though the script has not registered
them.

Such a state stays behind when a rank moves, and no comparison of registered state shows it: an
averaged copy of the weights, say, that is evaluated or saved at the end.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tmd.torch_private import ddp
from tmd.trainer.state.digests import digest_of
from tmd.trainer.state.left_out_optimizers import LeftOutOptimizers, memory_of, sample_of, within
from tmd.trainer.state.state import Registry

FIRST = 1
"""Committed steps after which the objects are found."""
LOOKS = (3, 50)
"""Committed steps after which they are compared: the second for what begins to change later."""

log = logging.getLogger("tmd.trainer")


class UnregisteredState:
    """Main thread only. Costs a pass over the interpreter's objects in one step of the job."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._steps = 0
        self._found: list[tuple[weakref.ref[Any], str]] = []
        self._optimizers = LeftOutOptimizers()

    def committed(self) -> str:
        """Call after each committed step. Returns what changes without being registered, in words;
        empty if nothing does, or if this is no step in which it is looked for."""
        self._steps += 1
        if self._steps != FIRST and self._steps not in LOOKS:
            return ""
        try:
            if self._steps == FIRST:
                return self._begin()
            return "; ".join(filter(None, (self._optimizers.found(), self._compared())))
        except Exception as error:
            # Any object of the script may be here, and none may stop the job.
            log.debug("unregistered state is not looked for: %s", error)
            self._found = []
            return ""
        finally:
            if self._steps == LOOKS[-1]:
                self._optimizers.end()

    def _begin(self) -> str:
        objects = gc.get_objects()
        self._optimizers.watch(objects, self._registry)
        self._found = [(weakref.ref(o), _content(o)) for o in self._unknown(objects)]
        states = {type(s).__name__ for w in self._registry.wrappers for s in ddp.hook_states(w)}
        if not states:
            return ""
        return (
            f"a communication hook of DDP keeps a {', '.join(sorted(states))}, which stays behind "
            "when the rank moves and is not undone with a broken step: use a hook without a state, "
            "or none"
        )

    def _compared(self) -> str:
        alive = [(each(), before) for each, before in self._found]
        changed = [o for o, before in alive if o is not None and _content(o) != before]
        if not changed:
            return ""
        self._found = []
        kinds = ", ".join(sorted({type(each).__name__ for each in changed}))
        return (
            f"steps change {kinds}, which session.register() does not know: it stays behind when "
            "the rank moves. If a later step or a result depends on it, name it in register()"
        )

    def _unknown(self, objects: list[Any]) -> list[object]:
        """Outermost modules, schedulers and scalers of ``objects`` that are not registered.

        Not a generator: that would be among the objects that it holds, so that one that is not run
        to its end would keep all of them alive.
        """
        # By memory, since a registered object may only contain the module.
        known = memory_of(self._registry.collect()[1])
        others = set(within(self._registry.others))
        modules = [o for o in objects if issubclass(type(o), nn.Module)]
        inner = {id(c) for m in modules for c in nn.Module.modules(m) if c is not m}
        found: list[object] = []
        for module in modules:
            own = memory_of(_tensors(module))
            # A module without parameters, such as a metric, is no copy of a model.
            trains = next(nn.Module.parameters(module), None) is not None
            if id(module) not in inner and trains and own and not own & known:
                found.append(module)
        for each in objects:
            kept = issubclass(type(each), (LRScheduler, ReduceLROnPlateau, GradScaler))
            if kept and id(each) not in others:
                found.append(each)
        return found


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from nn.Module.parameters(module)
    yield from nn.Module.buffers(module)


@torch.no_grad()
def _content(each: Any) -> str:
    """What a step may change of it."""
    if isinstance(each, nn.Module):
        return digest_of(map(sample_of, _tensors(each)))
    numbers = {k: v for k, v in each.state_dict().items() if isinstance(v, int | float)}
    return repr(sorted(numbers.items()))

"""Finds optimizers that update parameters of the registered model, but are not registered."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tmd.trainer.state.optimizer_state import params_of
from tmd.trainer.state.state import Registry


class LeftOutOptimizers:
    """Main thread only. Optimizers that are watched cost a call for each of their steps."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._handles: list[RemovableHandle] = []
        self._found: set[str] = set()

    def watch(self, objects: Iterable[object], known: Collection[int]) -> None:
        """Watch the optimizers among ``objects``. ``known``: identities of registered objects."""
        for each in objects:
            if issubclass(type(each), Optimizer) and id(each) not in known:
                # One that is half built, or only looks like one of torch's, has no hooks.
                with contextlib.suppress(Exception):
                    self._handles.append(each.register_step_post_hook(self._stepped))  # type: ignore[attr-defined]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def found(self) -> str:
        """What has run since the last call, in words; empty if nothing has."""
        found, self._found = sorted(self._found), set()
        if not found:
            return ""
        return (
            f"steps run {', '.join(found)} on parameters of the registered model, but "
            "session.register() does not know it: after a loss or a move the job trains on other "
            "numbers. Name each optimizer in register()"
        )

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        registry = self._registry
        optimized = {id(p) for each in registry.faces for p in params_of(each)}
        held = {id(p) for module in registry.modules for p in module.parameters()}
        if (held - optimized).intersection(map(id, params_of(optimizer))):
            self._found.add(type(optimizer).__name__)

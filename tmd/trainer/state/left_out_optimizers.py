"""Finds optimizers that update parameters of the registered model, but are not registered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from tmd.trainer.state.dtensors import local_part
from tmd.trainer.state.optimizer_state import params_of
from tmd.trainer.state.state import Registry

POINTS_TO_OTHERS = (nn.Module, LRScheduler, ReduceLROnPlateau)
"""Their ``state_dict`` does not contain that of an optimizer to which they point."""


SAMPLE = 256
"""Elements of a tensor that are compared. A step or an average changes all of them."""
LONGEST = 10_000
"""Elements of a list that is looked into: a longer one holds data."""


class LeftOutOptimizers:
    """Watches the optimizers that exist when ``watch`` is called: hooks show which of them run."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._found: set[str] = set()

    def watch(self, objects: Iterable[object], registry: Registry) -> None:
        """Watch the optimizers among ``objects`` with a parameter of a registered model that no
        registered optimizer has."""
        reached = set(within(registry.named.values(), unless=POINTS_TO_OTHERS))
        saved = registry.collect()[1]
        params = {id(p) for module in registry.modules for p in module.parameters()}
        left_out = params - registry.owners.owned
        for each in objects:
            if not issubclass(type(each), Optimizer):
                continue
            # One that is half built, or only looks like one of torch's, has no groups or hooks.
            with contextlib.suppress(Exception):
                optimizer = cast("Optimizer", each)
                # What points to it may save something else.
                if id(each) in reached and _state_in(optimizer, saved):
                    continue
                if left_out.intersection(map(id, params_of(optimizer))):
                    ran = partial(_ran, self._found)
                    self._handles.append(optimizer.register_step_post_hook(ran))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def found(self) -> str:
        """What has run since the last call, in words; empty if nothing has."""
        found = sorted(self._found)
        self._found.clear()
        if not found:
            return ""
        return (
            f"steps run {', '.join(found)} on parameters of the registered model, but "
            "session.register() does not know it: after a loss or a move the job trains on other "
            "numbers. Name each optimizer in register()"
        )


def _ran(found: set[str], optimizer: Optimizer, *_: object) -> None:
    """A hook that keeps nothing of the job alive."""
    found.add(type(optimizer).__name__)


def _state_in(optimizer: Optimizer, saved: Sequence[Tensor]) -> bool:
    """Whether a tensor of the optimizer's state, or a copy of one, is among those ``saved``, or the
    optimizer has none."""
    states = (v for state in optimizer.state.values() for v in state.values())
    kept = [v for v in states if isinstance(v, Tensor) and v.dim()]  # no numbers of steps
    if not kept or not memory_of(kept).isdisjoint(memory_of(saved)):
        return True
    largest = max(map(local_part, kept), key=Tensor.numel)
    sample = sample_of(largest).cpu()
    if not sample.any():
        return False  # another tensor may be zero, too
    alike = (t for t in map(local_part, saved) if t.shape == largest.shape)
    return any(torch.equal(sample_of(t).cpu(), sample) for t in alike)


def sample_of(tensor: Tensor) -> Tensor:
    """Some elements of this rank's part, from all over it: rows of an embedding may stay as they
    are."""
    whole = local_part(tensor).flatten()
    return whole[:: max(1, whole.numel() // SAMPLE)]


def memory_of(tensors: Iterable[Tensor]) -> set[int]:
    """The addresses of the tensors' memory, of this rank's parts. Empty ones have none."""
    return {local_part(tensor).untyped_storage().data_ptr() for tensor in tensors} - {0}


def within(
    objects: Iterable[object], *, unless: tuple[type, ...] = (), depth: int = 3
) -> Iterator[int]:
    """Identities of ``objects`` and of what they hold: one scheduler may chain others.

    ``unless``: types whose attributes are left out.
    """
    for each in objects:
        yield id(each)
        if depth and isinstance(each, list | tuple):
            if len(each) > LONGEST:
                continue
            yield from within(each, unless=unless, depth=depth - 1)
        elif depth and hasattr(each, "__dict__") and not isinstance(each, unless):
            yield from within([*vars(each).values()], unless=unless, depth=depth - 1)

"""Leaves a step that a lost rank has broken, before the script has computed it to its end.

A forward pass ends with an exception, at the next module. A backward pass cannot end so: DDP would
count on the gradients that did not come, and refuse the next step. Instead the next module gets no
gradient. Autograd then skips most of the work below it, and still tells DDP of each parameter. Only
a custom function gets zeros, and a checkpointed layer computes forward once more.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from tmd.torch_private.autograd import in_backward
from tmd.torch_private.fsdp import sharded_modules
from tmd.trainer.session.hooks import Interrupted

T = TypeVar("T")


def refuse(modules: Sequence[nn.Module], *, built: bool) -> None:
    """Raises ValueError: a step of ``modules`` cannot be left early.

    ``built``: whether by :meth:`Session.build`, as those of a pipeline are.
    """
    reasons = {
        "FSDP2, which expects the rest of a step": any(True for _ in sharded_modules(modules)),
        "session.build(), whose objects may expect the rest of a step": built,
        "backward hooks of parameters or modules, which may not expect that no gradient comes": (
            any(_has_hooks(part) for module in modules for part in module.modules())
        ),
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise ValueError(f"leave_early=True does not work with {'; '.join(found)}: leave it out")


def _has_hooks(module: nn.Module) -> bool:
    own = module._backward_hooks or module._backward_pre_hooks
    return bool(own) or any(p._backward_hooks for p in module.parameters(recurse=False))


def left_early(batches: Iterator[T], due: Callable[[], bool]) -> Iterator[T]:
    """``batches``, each of whose steps is left at the next module once ``due`` says so."""
    thread = threading.get_ident()

    def enter(module: nn.Module, given: object) -> None:
        # Compiled code has no hooks inside: it is left before or after. Other threads of the script
        # may run modules of their own, such as transforms of data.
        if torch.compiler.is_compiling() or threading.get_ident() != thread:
            return
        if due() and not in_backward():
            raise Interrupted

    def leave(module: nn.Module, given: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            for node in _nodes(output):
                node.register_prehook(drop)

    def drop(gradients: tuple[Tensor | None, ...]) -> tuple[None, ...] | None:
        return (None,) * len(gradients) if due() else None

    # torch warns that a compiled module calls them twice, which does no harm.
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global")
    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield from batches
    finally:
        for hook in hooks:
            hook.remove()


def _nodes(output: object) -> Iterator[Any]:
    """The backward nodes of the tensors in ``output``, the result of a module."""
    match output:
        case Tensor() if output.grad_fn is not None:
            yield output.grad_fn
        case list() | tuple():
            for each in output:
                yield from _nodes(each)
        case dict():
            for each in output.values():
                yield from _nodes(each)

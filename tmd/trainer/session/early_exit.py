"""Leaves a step that a lost rank has broken, before the script has computed it to its end.

A forward pass ends with an exception, at the next module. A backward pass must not end with one:
DDP would still expect the missing gradients, and reject the next step. Instead the next module gets
no gradient. Autograd then skips most of the work below it, and still tells DDP of each parameter.
A custom function gets zeros, and a checkpointed layer computes forward once more.
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
from tmd.torch_private.ddp import has_static_graph
from tmd.torch_private.fsdp import sharded_modules
from tmd.torch_private.modules import has_backward_hooks
from tmd.trainer.session.hooks import Interrupted

T = TypeVar("T")


def refuse(modules: Sequence[nn.Module], *, built: bool) -> None:
    """Raises ValueError: a step of ``modules`` cannot be left early.

    ``built``: whether :meth:`Session.build` has constructed them, as it does for a pipeline.
    """
    reasons = {
        "FSDP2, which expects the rest of a step": any(True for _ in sharded_modules(modules)),
        "static_graph of DDP, which counts gradients in the first step": has_static_graph(modules),
        "session.build(), whose objects may expect the rest of a step": built,
        "backward hooks of parameters or modules, which may fail when a gradient is None": any(
            has_backward_hooks(part) for module in modules for part in module.modules()
        ),
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise ValueError(
            f"leave_early=True does not support {'; '.join(found)}: remove leave_early=True"
        )


def left_early(batches: Iterator[T], due: Callable[[], bool]) -> Iterator[T]:
    """Yield from ``batches``. While ``due()`` is true, the current step ends at its next module."""
    thread = threading.get_ident()

    def enter(module: nn.Module, given: object) -> None:
        # Hooks do not run inside compiled code. Other threads of the script may run modules of
        # their own, such as transforms of data.
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

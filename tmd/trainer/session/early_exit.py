"""Leaves a step that a lost rank has broken, before the script has computed it to its end.

A forward pass ends with an exception, at the next module. A backward pass cannot end so: DDP would
count on the gradients that did not come, and refuse the next step. Instead the next module gets no
gradient. Autograd then skips the work below it, and still tells DDP of each parameter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
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


def refuse_shards(modules: Iterable[nn.Module]) -> None:
    """Raises ValueError: a step of one of ``modules`` cannot be left early."""
    if any(True for _ in sharded_modules(modules)):
        raise ValueError(
            "leave_early=True does not work with FSDP2, which would expect the rest of the step: "
            "leave it out"
        )


def left_early(batches: Iterator[T], due: Callable[[], bool]) -> Iterator[T]:
    """``batches``, each of whose steps is left at the next module once ``due`` says so."""

    def enter(module: nn.Module, given: object) -> None:
        # Compiled code has no hooks inside: it is left before or after.
        if not torch.compiler.is_compiling() and due() and not in_backward():
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

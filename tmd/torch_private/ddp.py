"""``torch.nn.parallel.DistributedDataParallel``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
    _AllreduceUpcastHookState,
)
from torch.nn.parallel import DistributedDataParallel

from tmd.torch_private.c10d import Work


def ddp_of(module: nn.Module) -> DistributedDataParallel | None:
    """``module`` if it is a DDP module, or the one that it is compiled from."""
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        module = inner
    return module if isinstance(module, DistributedDataParallel) else None


def has_static_graph(modules: Iterable[nn.Module]) -> bool:
    """Whether DDP with ``static_graph`` is around one of ``modules``."""
    return any(ddp is not None and ddp.static_graph for ddp in map(ddp_of, modules))


def fix_buckets(module: DistributedDataParallel) -> str:
    """Assign the gradients of ``module`` to buckets for good; returns the indices of each bucket's
    parameters in words. Empty if DDP never changes the buckets that it begins with.

    They go into buckets in the reverse order of the parameters. By itself DDP has a single bucket
    in the first backward pass, and then assigns gradients in the order in which they became ready
    on rank 0. A process that has yet to run that pass would call other collectives than the others,
    which hang or add up gradients of different parameters.

    Raises:
        ValueError: other parameters require gradients than when DDP was built.
    """
    keeps = module.find_unused_parameters and not module.static_graph
    if keeps or module._delay_all_reduce_all_params:
        return ""
    if module not in _FIXED:
        _FIXED[module] = _rebuilt_by_itself(module) or _fix(module)
    return _FIXED[module]


_FIXED: WeakKeyDictionary[DistributedDataParallel, str] = WeakKeyDictionary()
"""Module -> what :func:`fix_buckets` has returned."""


def _rebuilt_by_itself(module: DistributedDataParallel) -> str:
    """In words, the buckets that ``module`` has made after a backward pass; empty if none."""
    # The flag does not suffice: a copy of a module has it, too.
    assert module.logger is not None
    module.logger.set_runtime_stats_and_log()  # does nothing before a forward pass
    return str(_logged(module).get("rebuilt_per_bucket_param_indices", ""))


def _fix(module: DistributedDataParallel) -> str:
    buckets = _assigned(module)
    numbers = [[*chain(*buckets), len(buckets)], [len(each) for each in buckets]]
    taken = _rebuild(module, numbers)
    return ", ".join(" ".join(map(str, each)) for each in buckets) if taken else ""


def _assigned(module: DistributedDataParallel) -> list[list[int]]:
    """The indices of the parameters of each bucket, as large as DDP would make them."""
    params, expects_sparse = module._build_params_for_reducer()  # type: ignore[no-untyped-call]
    known = _logged(module)["num_parameter_tensors"]
    if len(params) != known:
        later = ", or after session.register()" if len(params) < known else ""
        raise ValueError(
            f"{len(params)} parameters of a model require gradients, and {known} did when "
            f"DistributedDataParallel was built: change requires_grad before that{later}"
        )
    order = list(reversed(range(len(params))))
    buckets, _ = dist._compute_bucket_assignment_by_size(
        [params[i] for i in order], _limits(module), expects_sparse, order
    )
    # Buckets of several types come in an order that may depend on the number of the device.
    return sorted((list(each) for each in buckets), key=max, reverse=True)


def _limits(module: DistributedDataParallel) -> list[int]:
    """Sizes of the buckets in bytes, the last one for all further ones."""
    if module.static_graph and module._comm_hooks:
        # In its first backward pass a static graph gives the hook of each bucket the parameters of
        # the first one.
        return [sys.maxsize]
    if module.bucket_bytes_cap_list:
        return list(module.bucket_bytes_cap_list)
    first = [dist._DEFAULT_FIRST_BUCKET_BYTES] if module.bucket_bytes_cap_default else []
    return [*first, module.bucket_bytes_cap]


def _logged(module: DistributedDataParallel) -> dict[str, Any]:
    logged: dict[str, Any] = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return logged


def _rebuild(module: DistributedDataParallel, broadcasts: list[list[int]]) -> bool:
    """Make the reducer rebuild its buckets, with ``broadcasts`` as what rank 0 sends. Returns false
    if it has rebuilt them before."""
    reducer, alone = module.reducer, _Alone(broadcasts)
    reducer._update_process_group(alone)
    try:
        # It does nothing before the first backward pass, unless it is given all parameters.
        if not (taken := reducer._rebuild_buckets()):
            reducer._push_all_rebuilt_params()
            taken = reducer._rebuild_buckets()
    finally:
        reducer._update_process_group(module.process_group)
    module._has_rebuilt_buckets = True
    return bool(taken)


class _Alone(ProcessGroup):
    """A group of one rank, which gets given numbers in broadcasts."""

    def __init__(self, broadcasts: list[list[int]]) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._broadcasts = iter(broadcasts)

    def broadcast(self, tensors: list[torch.Tensor], _: object) -> Work:  # type: ignore[override]
        (numbers,) = tensors
        numbers.copy_(torch.tensor(next(self._broadcasts), dtype=numbers.dtype))
        return _Done()


class _Done(Work):
    def wait(self, _: object = None) -> bool:
        return True


def hook_states(module: DistributedDataParallel) -> list[object]:
    """What the communication hooks of ``module`` keep from step to step."""
    states = (state for _, state in module._comm_hooks)
    own = (ProcessGroup, _AllreduceUpcastHookState)  # of DDP itself
    return [each for each in states if each is not None and not isinstance(each, own)]

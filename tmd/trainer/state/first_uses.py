"""Finds the steps in which this process uses a DDP module for the first time.

In its first backward pass DDP assigns gradients to buckets by the order of the parameters, and from
the next forward pass on by the order in which they became ready. If ranks have different orders,
gradients of different parameters are added up, and buckets of equal size hide it. A standby has run
shadow steps, so it may be ahead of ranks that have just started, or behind them for a module that
its steps have not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tmd.torch_private import ddp

TRIES = 4
"""Steps after whose use of a module it must have settled. Otherwise it never does."""


class _Awaited:
    """A module that has not settled its buckets."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module
        self._tries = 0
        self._ran = False
        params: list[Any] = [p for p in module.parameters() if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._use) for p in params]

    def _use(self, _: Tensor) -> None:
        self._ran = True

    @property
    def used(self) -> bool:
        """Whether the module has reduced gradients in the present step. Those of its parameters may
        come from a pass in which it took no part."""
        return self._ran and ddp.reduces(self.module)

    @property
    def settled(self) -> bool:
        return ddp.has_rebuilt_buckets(self.module)

    def next_step(self) -> bool:
        """A step begins. Returns whether the module is still to settle."""
        self._tries += self.used
        self._ran = False
        return not self.settled and self._tries < TRIES

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


class FirstUses:
    """Used by the main thread only. ``modules`` may change before :meth:`renew`."""

    def __init__(self, modules: Sequence[DistributedDataParallel]) -> None:
        self._modules = modules
        self._awaited: list[_Awaited] = []
        self.renew()

    def renew(self) -> None:
        """Watch the modules that are registered now."""
        for each in self._awaited:
            each.end()
        self._awaited = [_Awaited(m) for m in self._modules if ddp.rebuilds_buckets(m)]

    def begin(self) -> None:
        """A step begins. Called before :func:`tmd.torch_private.ddp.await_forward`."""
        later = [each for each in self._awaited if each.next_step()]
        for each in self._awaited:
            if each not in later:
                each.end()
        self._awaited = later

    @property
    def now(self) -> bool:
        """Whether the step has used a module for the first time."""
        return any(each.used and not each.settled for each in self._awaited)

    @property
    def unsettled(self) -> bool:
        """Whether the step has used a module whose buckets were not settled when it began."""
        return any(each.used or each.settled for each in self._awaited)

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
        self._reduces = False
        """Whether it has run a forward pass whose backward pass reduces gradients."""
        self.used = False
        """Whether that backward pass has run in the present step, before buckets were settled."""
        params: list[Any] = [p for p in module.parameters() if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._run_backward) for p in params]
        self._hooks.append(module.register_forward_hook(self._run_forward))

    def _run_forward(self, *_: Any) -> None:
        # Its later passes, such as one of an evaluation, change nothing.
        self._reduces = self._reduces or ddp.reduces(self.module)

    def _run_backward(self, _: Tensor) -> None:
        # Gradients may also come from a pass in which the module takes no part.
        self.used = self.used or (self._reduces and not self.settled)

    @property
    def settled(self) -> bool:
        return ddp.has_rebuilt_buckets(self.module)

    def next_step(self) -> bool:
        """A step begins. Returns whether the module is still to settle; ends the watch if not."""
        if self.used:  # otherwise the forward pass may be of the step that begins
            self._tries += 1
            self._reduces = self.used = False
        unsettled = not self.settled and self._tries < TRIES
        if not unsettled:
            self.end()
        return unsettled

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
        """A step begins."""
        self._awaited = [each for each in self._awaited if each.next_step()]

    @property
    def now(self) -> bool:
        """Whether the step has used a module for the first time."""
        return any(each.used for each in self._awaited)

    @property
    def unsettled(self) -> bool:
        """Whether the step has used a module whose buckets were not settled when it began."""
        return any(each.used or each.settled for each in self._awaited)

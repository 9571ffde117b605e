"""Repairs parameters that a sharded optimizer (ZeroRedundancyOptimizer) may have left torn.

After the vote of a step and the work of the local optimizers each owner broadcasts its parameters.
If a broadcast breaks, the step still counts, and a rank may hold stale or torn parameters of other
owners. All ranks therefore repeat the broadcasts in each epoch before they compute a step. This
suffices for any lost rank, with and without a return to a snapshot:

* A rank with torn parameters is in a poisoned epoch, where it neither commits nor takes a snapshot:
  an operation that breaks poisons the epoch before it ends, and ``step()`` waits for all
  operations. The rank therefore enters a new epoch before it computes a step.
* An owner's own parameters are never torn. Every rank had whole gradients in the vote. An undecided
  rank applies them in the poisoned epoch. A broadcast only reads at its root.
* A copy of a torn state is correct in the parameters that the rank owns, and the worker that
  assumes the rank becomes their owner.

Values that the script computed from torn parameters (an averaged copy, say) cannot be repaired. A
worker that has registered such values ends and is replaced as a lost rank, unless all ranks have
returned to a snapshot.
"""

from __future__ import annotations

import torch
from msgspec import msgpack
from torch.optim.lr_scheduler import LRScheduler

from tmd.fabric import Fabric
from tmd.torch_private.optimizers import broadcast_parameters, call_first_after_step
from tmd.trainer.state.digests import digest_of
from tmd.trainer.state.layout import flatten
from tmd.trainer.state.state import Registry

READS_NO_PARAMETERS = (LRScheduler, torch.amp.GradScaler)
"""Objects that change after the optimizer without reading parameters."""


class ParameterResync:
    """Main thread."""

    def __init__(self, registry: Registry, fabric: Fabric) -> None:
        self._registry = registry
        self._fabric = fabric
        self._epoch = -1
        """The latest epoch in which parameters were broadcast again."""
        self._torn = ""
        """Digest of values that the script may compute from parameters, as of the broken step."""
        self.watch()

    def watch(self) -> None:
        """Watch the optimizers that are registered now."""
        for whole in self._registry.divided:
            # Before the script's hooks, which may compute from parameters already.
            call_first_after_step(whole, self._stepped)

    def _stepped(self) -> None:
        # The first digest stays: the script may compute something between two such optimizers.
        if self._fabric.poisoned and not self._torn:
            self._torn = self._derived()

    @property
    def spoilt(self) -> str:
        """Why this state can be neither repaired nor copied; empty if it can."""
        if not self._torn or self._torn == self._derived():
            return ""
        return (
            "what the script has computed after the optimizer's step is spoilt: a rank was lost or "
            "a link broke while ZeroRedundancyOptimizer sent parameters"
        )

    def restored(self) -> None:
        """Note that the state was replaced by a whole one."""
        self._torn = ""

    def is_due(self, epoch: int) -> bool:
        """Whether parameters must be broadcast again before ``epoch`` computes a step."""
        return bool(self._registry.divided) and epoch != self._epoch

    def broadcast(self, epoch: int) -> None:
        """Let each owner broadcast its parameters. A failure poisons ``epoch``.

        Raises:
            RuntimeError: this rank's state cannot be repaired.
        """
        if why := self.spoilt:
            raise RuntimeError(why)
        # In every epoch on every rank, even the first: a joiner cannot know the previous epoch.
        self._torn, self._epoch = "", epoch
        for whole in self._registry.divided:
            broadcast_parameters(whole)

    def _derived(self) -> str:
        """Digest of all registered values except optimizers and what they change."""
        registry = self._registry
        stepped = registry.owners.owned
        tensors = [
            tensor
            for module in registry.modules
            for tensor in (*module.parameters(), *module.buffers())
            if id(tensor) not in stepped
        ]
        states = [o.state_dict() for o in registry.others if not isinstance(o, READS_NO_PARAMETERS)]
        layout, more = flatten(states)
        return msgpack.encode(layout).hex() + digest_of([*tensors, *more])

"""Making parameters equal again that a divided optimizer may have left torn.

After the vote of a step and the work of the local optimizers each owner broadcasts its parameters.
If that breaks, the step counts all the same, and a rank may hold stale or torn parameters of
others. So in each epoch, before anything else, all ranks do the broadcasts again. That is enough,
whoever was lost, and whether or not all go back to a snapshot:

* Whoever holds torn parameters is in a poisoned epoch, in which it commits nothing more and takes
  no snapshot: an operation that breaks poisons the epoch before it is over, and ``step()`` waits
  for all of them. So it comes to a new epoch, as everybody does, before it computes a step.
* An owner's own parameters are never torn. Who committed the step had whole gradients in its vote;
  who was undecided, too, and applies them in the poisoned epoch; and a broadcast only reads at its
  root.
* A copy of a rank's state that was made of a torn one is right in what the rank owns, and who takes
  it over is the owner from then on.

What a script has computed from torn parameters before that (an averaged copy, say) cannot be put
right so. Whoever has such a thing among what is registered ends, unless all have gone back, and is
replaced as any rank that was lost.
"""

from __future__ import annotations

import torch
from msgspec import msgpack
from torch.optim.lr_scheduler import LRScheduler

from tmd.fabric import Fabric
from tmd.torch_private.optimizers import broadcast_parameters, call_first_after_step
from tmd.trainer.state.digests import digest_of
from tmd.trainer.state.state import Registry, flatten, params_of

UNREADING = (LRScheduler, torch.amp.GradScaler)
"""What changes after the optimizer and does not look at parameters."""


class ParameterResync:
    """For the main thread."""

    def __init__(self, registry: Registry, fabric: Fabric) -> None:
        self._registry = registry
        self._fabric = fabric
        self._epoch = -1
        """The latest in which it was done."""
        self._torn = ""
        """Digest of what the script may compute from parameters, as it was when they were torn."""
        self.watch()

    def watch(self) -> None:
        """Others are registered now."""
        for whole in self._registry.divided:
            # Before the script's hooks, which may compute from parameters already.
            call_first_after_step(whole, self._stepped)

    def _stepped(self) -> None:
        # Between two such optimizers the script may have computed something already.
        if self._fabric.poisoned and not self._torn:
            self._torn = self._derived()

    @property
    def spoilt(self) -> str:
        """Why this state cannot be put right, nor be given to others; empty if it can."""
        if not self._torn or self._torn == self._derived():
            return ""
        return (
            "what the script has computed after the optimizer's step is spoilt: a rank was lost or "
            "a link broke while ZeroRedundancyOptimizer sent parameters"
        )

    def restored(self) -> None:
        """The state is another one, and whole."""
        self._torn = ""

    def is_due(self, epoch: int) -> bool:
        """Whether it has to be done before a step is computed in ``epoch``."""
        return bool(self._registry.divided) and epoch != self._epoch

    def level(self, epoch: int) -> None:
        """Let each owner broadcast what it owns. If that breaks, ``epoch`` is poisoned.

        Raises:
            RuntimeError: this rank's state is spoilt for good.
        """
        if why := self.spoilt:
            raise RuntimeError(why)
        # In every epoch and on every rank, the first included: who joins cannot know what was.
        self._torn, self._epoch = "", epoch
        for whole in self._registry.divided:
            broadcast_parameters(whole)

    def _derived(self) -> str:
        """Digest of all that is registered but optimizers, and what those change."""
        registry = self._registry
        stepped = {id(p) for o in registry.faces for p in params_of(o)}
        tensors = [
            tensor
            for module in registry.modules
            for tensor in (*module.parameters(), *module.buffers())
            if id(tensor) not in stepped
        ]
        states = [o.state_dict() for o in registry.others if not isinstance(o, UNREADING)]
        layout, more = flatten(states)
        return msgpack.encode(layout).hex() + digest_of([*tensors, *more])

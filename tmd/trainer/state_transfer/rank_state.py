"""The state of a rank in this process: read, replaced or dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tmd.core.values.errors import StateMismatch
from tmd.fabric import Fabric
from tmd.trainer.protocol.copies import StateCopy
from tmd.trainer.state.compatibility import part_mismatch
from tmd.trainer.state.data import Feed, Position
from tmd.trainer.state.digests import Digest
from tmd.trainer.state.layout import Layouts
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.roles import short_digest
from tmd.trainer.state.state import Registry
from tmd.trainer.state.units import BUFFERS, Units
from tmd.trainer.state_transfer.early_digest import EarlyDigest
from tmd.trainer.state_transfer.parameter_resync import ParameterResync


class RankState:
    """The objects that the script has registered, and its data position.

    Main thread or :class:`Continuation`.
    """

    def __init__(
        self,
        fabric: Fabric,
        registry: Registry,
        units: Units,
        wrapped: list[nn.Module],
        local: LocalState,
    ) -> None:
        """``wrapped``: the DDP modules that the script has registered."""
        self._registry = registry
        self._units = units
        self._wrapped = wrapped
        self.local = local
        self.early = EarlyDigest(units)
        self.resync = ParameterResync(registry, fabric)
        self.feed: Feed | None = None
        self.layouts: Layouts = registry.collect()[0]
        """Layouts of the state at registration."""

    @property
    def call(self) -> int:
        """Number of the ``batches()`` call that the script is in."""
        assert self.feed is not None
        return self.feed.call

    @property
    def position(self) -> Position:
        """Position of the next batch; any thread."""
        return Position() if self.feed is None else self.feed.position

    def collect(self) -> tuple[Layouts, list[Tensor]]:
        """The whole current state."""
        return self._registry.collect()

    def difference(self, layouts: Layouts) -> str:
        """Why a state of ``layouts`` cannot replace the one here; empty if it can. Optimizers may
        differ."""
        return self._registry.difference(self.layouts, layouts)

    def other_groups(self, layouts: Layouts) -> str:
        """How the parameter groups of optimizers differ from those in ``layouts``; empty if they do
        not."""
        return self._registry.other_groups(layouts)

    @property
    def buckets(self) -> str:
        """As :attr:`Role.buckets`."""
        return short_digest(self._registry.buckets)

    def digest(self, step: int) -> Callable[[], Digest]:
        """Returns a function that computes the digest of all that replicas share: no buffers."""
        found = self.early.of(step)
        return lambda: {k: v for k, v in found().items() if k != BUFFERS}

    # --- the same rank, rebuilt -------------------------------------------------------------------

    def taken(self) -> tuple[Layouts, list[Tensor]]:
        """A copy of the whole state, in host memory."""
        layouts, tensors = self.collect()
        return layouts, [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def drop_objects(self) -> None:
        """Drop the registered objects before new ones are built: a device may not hold both."""
        self.early.forget()
        self._registry.renew({})
        self._wrapped.clear()
        self.local.renew()
        self._units.renew()

    def renew(self) -> None:
        """Use the objects that are registered now."""
        self._units.renew()
        self.resync.watch()
        self.layouts = self.collect()[0]

    def give(self, layouts: Layouts, tensors: Sequence[Tensor]) -> None:
        """Restore a state that was copied before the objects were rebuilt.

        Raises:
            StateMismatch: the new objects differ, so the state would be lost.
        """
        if difference := self.difference(layouts) or self.other_groups(layouts):
            raise StateMismatch(f"this rank was rebuilt with a different state: {difference}")

        def fill(targets: Sequence[Tensor]) -> None:
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor)

        self.place(layouts, fill)

    # --- another state ----------------------------------------------------------------------------

    @torch.no_grad()
    def place(self, layouts: Layouts, fill: Callable[[list[Tensor]], object]) -> None:
        """Replace the state by one of ``layouts``, whose tensors ``fill`` fills.

        Raises:
            StateMismatch: an object does not take the state that it is given.
        """
        self.early.forget()
        targets, pending = self._registry.place(layouts)
        fill(targets)
        for late in pending:
            late.apply()
        self.local.placed()

    @property
    def graded(self) -> tuple[int, ...]:
        """Units that have a gradient."""
        return self._units.graded

    def grade(self, graded: Sequence[int] | None) -> None:
        """Give exactly these units a gradient, of zeros, unless they are unknown."""
        if graded is not None:
            self._units.grade(graded)

    def adopt(self, local: bytes) -> None:
        """Complete a rank's state with ``local``, the part that replicas do not share."""
        self.local.adopt(local)
        self.resync.restored()

    def put_back(self, copy: StateCopy) -> None:
        """Return to the state and the data position of ``copy``.

        Raises:
            StateMismatch: this worker is built for another rank.
        """
        if difference := part_mismatch(self.layouts, copy.layouts):
            raise StateMismatch(difference)
        self.early.forget()
        for unit, tensors in copy.units():
            self._units.place(unit.number, unit.layout, tensors)
        boundary, tensors = copy.rest()
        assert boundary.rest is not None
        self._units.place_rest(boundary.rest, tensors)
        self._units.grade(boundary.graded)
        self.resync.restored()
        self.local.forget()
        self.local.placed()
        self.seek(boundary.position)

    def draw_anew(self) -> None:
        """Stay at the position, as the rank that this worker holds now. A call that has ended gives
        no batches."""
        assert self.feed is not None
        if not self.feed.closed:
            self.feed.seek(self.feed.position)

    def seek(self, position: Position) -> None:
        """Continue with the batch at ``position``, as the rank that this worker holds now."""
        assert self.feed is not None
        self.feed.seek(position)

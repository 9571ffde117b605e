"""The shadowed rank's state as it arrives: unit by unit, and by the tails of later steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from tmd.trainer.protocol.frames import Tail, Unit
from tmd.trainer.state.layout import unflatten
from tmd.trainer.state.units import Units

log = logging.getLogger("tmd.trainer")


class CopiedState:
    """Places units in ``units``, and runs the optimizers on those that are here."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self.missing = set(range(len(units)))
        """Units that have not yet arrived."""

    @property
    def share(self) -> float:
        """Part of the units that has arrived, 0 to 1."""
        return 1 - len(self.missing) / max(len(self._units), 1)

    def begin(self) -> None:
        """All units come again."""
        self.missing = set(range(len(self._units)))

    def place(self, unit: Unit, tensors: Sequence[Tensor]) -> None:
        """Replace one unit."""
        self._units.place(unit.number, unit.layout, tensors)
        self.missing.discard(unit.number)

    def follow(self, tail: Tail, tensors: Sequence[Tensor]) -> None:
        """Apply the optimizer's work of one step to the units that are here."""
        optimizer = self._units.optimizers[tail.optimizer]
        params = self._units.params
        own = self._units.of(tail.optimizer)
        for number in own:
            params[number].grad = None
        self._units.give_gradients(
            {n: t for n, t in zip(tail.units, tensors, strict=False) if n not in self.missing}
        )
        values = unflatten(tail.values, iter(tensors[len(tail.units) :]))
        try:
            # The rank may be in a later batches() call, and have added a parameter group before it.
            self._units.set_values(tail.optimizer, values)
            optimizer.step()
        except Exception as error:
            # The digest shows any failure of the optimizer.
            log.info("%s does not support tails: %s", type(optimizer).__name__, error)
        for number in own:
            params[number].grad = None

"""Warns of optimizers whose state changes in a step before the vote.

A hand-written Muon may sum its gradients and advance its momentum first, and apply the update in
``step()``. If the step breaks in between, its repeat advances the momentum a second time: a step
copies the parameters that change before the vote, but not the state of optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

from torch import Tensor

from tmd.trainer.state.buffers import version
from tmd.trainer.state.state import Registry

LOOKS = 3
"""Steps that are looked at. In the first one most optimizers have no state yet."""

Marks = dict[tuple[int, int, Hashable], tuple[int, int]]
"""Optimizer, parameter and name -> tensor and version."""

log = logging.getLogger("tmd.trainer")


class EarlyState:
    """Compares the state of the registered optimizers at the begin and at the vote of steps."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._looks = 0
        self._begun: Marks | None = None

    def begin(self) -> None:
        """A step begins in which an optimizer runs."""
        self._begun = self._marks() if self._looks < LOOKS else None

    def forget(self) -> None:
        """Another state was put in place."""
        self._begun = None

    def check(self) -> None:
        """The step has come to its vote: warn of a tensor that the script has written to.

        Not of one that is new or replaced, as SAM replaces its perturbation in each step: that does
        not depend on what was there before.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return
        self._looks += 1
        for place, (tensor, written) in self._marks().items():
            before = begun.get(place)
            if before is not None and before[0] == tensor and before[1] != written:
                self._looks = LOOKS
                return self._warn(place)

    def _warn(self, place: tuple[int, int, Hashable]) -> None:
        number, _, name = place
        log.warning(
            "the script writes to the state of %s (%r) in a step before the vote: if a rank is "
            "lost in between, the repeat writes to it again, and the numbers change. Write to it "
            "in step(), or keep it in a buffer of a registered module",
            *(type(self._registry.optimizers[number]).__name__, name),
        )

    def _marks(self) -> Marks:
        return {
            (number, id(param), name): (id(value), version(value))
            for number, optimizer in enumerate(self._registry.optimizers)
            for param, values in optimizer.state.items()
            if isinstance(values, dict)
            for name, value in values.items()
            if isinstance(value, Tensor)
        }

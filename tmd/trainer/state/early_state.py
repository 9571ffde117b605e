"""Refuses optimizers whose state changes in a step before the vote.

A hand-written Muon may sum its gradients and advance its momentum first, and apply the update in
``step()``. If the step breaks in between, its repeat would advance the momentum a second time: a
step copies the parameters that change before the vote, but not the state of optimizers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from torch import Tensor

from tmd.trainer.state.buffers import version
from tmd.trainer.state.state import Registry

LOOKS = 3
"""Steps that are looked at. In the first one most optimizers have no state yet."""

Marks = dict[tuple[int, int, Hashable], Hashable]


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
        """The step has come to its vote.

        Raises:
            RuntimeError: the script has changed the state of an optimizer.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return
        self._looks += 1
        for (number, _, name), _mark in self._marks().items() - begun.items():
            kind = type(self._registry.optimizers[number]).__name__
            raise RuntimeError(
                f"the state of {kind} ({name!r}) changes in a step before the vote: if a rank is "
                "lost then, the repeat would change it again. Change it in step(), and call its "
                "collectives before; or keep it in a buffer of a registered module"
            )

    def _marks(self) -> Marks:
        return {
            (number, id(param), name): mark
            for number, optimizer in enumerate(self._registry.optimizers)
            for param, values in optimizer.state.items()
            if isinstance(values, dict)
            for name, mark in _values(values)
        }


def _values(values: dict[Hashable, object]) -> Iterator[tuple[Hashable, Hashable]]:
    """What differs once a value was replaced or written to."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, (id(value), value.data_ptr(), version(value))
        elif isinstance(value, int | float):
            yield name, value

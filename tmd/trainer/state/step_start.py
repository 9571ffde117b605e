"""What other threads read of the parameters that a step changes before its vote.

They copy parameters and compute their digest while a step is computed. Where a momentum encoder or
SAM changes a parameter meanwhile, they must read its value at the start of the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from tmd.fabric import device
from tmd.fabric.device import Queued
from tmd.trainer.state.dtensors import local_part


class StepStart:
    """Copies of parameters at the start of the present step. The main thread keeps them before the
    step changes the parameters, and drops them once the parameters have their values again, or may
    take new ones."""

    def __init__(self, moved: Callable[[], frozenset[int]] = frozenset) -> None:
        """``moved``: identities of the parameters that steps have changed and no optimizer owns;
        main thread."""
        self.moved = moved
        self.placed = False
        """Whether another state was put in place since the script has begun a step."""
        self._turn, self._reading = threading.Lock(), threading.Lock()
        self._values: Mapping[int, Tensor] = {}
        self._queued: Queued = device.NOTHING

    def keep(self, values: Mapping[int, Tensor]) -> None:
        """From here on the parameters of these identities may change: threads read ``values``, of
        this rank's parts. Waits for the piece that one of them reads now."""
        if values or self._values:
            self._replace(values, values.values())

    def drop(self, restored: Iterable[Tensor] = ()) -> None:
        """Threads read the parameters themselves again. A device may still be restoring those in
        ``restored``."""
        if self._values:
            self._replace({}, restored)

    def place(self) -> None:
        """Another state is put in place, in which the script has no part."""
        self.placed = True
        self.drop()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """For one piece: what :meth:`of` returns keeps its values. Any thread."""
        with self._turn:
            pass  # a reader that comes again at once does not overtake the main thread
        with self._reading, device.after(self._queued):
            yield

    def of(self, param: Tensor) -> Tensor:
        """This rank's part of ``param`` with its value at the start of the step. A copy may be in
        host memory while the parameter is on a device."""
        found = self._values.get(id(param))
        return local_part(param) if found is None else found

    def _replace(self, values: Mapping[int, Tensor], written: Iterable[Tensor]) -> None:
        queued = device.current().queued(written)
        with self._turn, self._reading:
            self._values, self._queued = dict(values), queued

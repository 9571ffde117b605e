"""What other threads read of the parameters that a step changes before its vote.

They copy parameters and compute their digest while a step is computed. Where a momentum encoder or
SAM changes a parameter meanwhile, they must read its value at the start of the step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from tmd.fabric import device
from tmd.fabric.device import Queued
from tmd.trainer.state.dtensors import local_part


class StepStart:
    """Copies of parameters at the start of the present step. The main thread keeps them before the
    step changes the parameters, and drops them once the parameters have their values again, or may
    take new ones."""

    def __init__(self) -> None:
        self.moved: frozenset[int] = frozenset()
        """Identities of parameters that steps have changed and no optimizer owns."""
        self._reading = threading.Lock()
        self._values: Mapping[int, Tensor] = {}
        self._queued: Queued = device.NOTHING

    def keep(self, values: Mapping[int, Tensor]) -> None:
        """From here on the parameters of these identities may change: threads read ``values``, of
        this rank's parts. Waits for the piece that one of them reads now."""
        if values or self._values:
            queued = device.current().queued(values.values())
            with self._reading:
                self._values, self._queued = dict(values), queued

    def drop(self) -> None:
        """Threads read the parameters themselves again."""
        self._values = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """For one piece: what :meth:`of` returns keeps its values. Any thread."""
        with self._reading, device.after(self._queued):
            yield

    def of(self, param: Tensor) -> Tensor:
        """This rank's part of ``param`` with its value at the start of the step. A copy may be in
        host memory while the parameter is on a device."""
        found = self._values.get(id(param))
        return local_part(param) if found is None else found

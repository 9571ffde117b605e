"""The time when this worker's parameters do not change: from the start of a step to its vote.

Meanwhile a background thread may copy them or compute their digest, piece by piece. The main thread
closes the window before the optimizer runs and waits at most for the current piece. For parameters
that do change in this time see :mod:`tmd.trainer.state.step_start`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from tmd.fabric import device
from tmd.fabric.device import Queued
from tmd.trainer.state.step_start import StepStart


class Window:
    """Opened and closed by the main thread; other threads read the parameters in it."""

    def __init__(
        self, parameters: Callable[[], Iterable[Tensor]], start: StepStart | None = None
    ) -> None:
        """``parameters``: what is read in the window, for its devices. ``start``: see
        :class:`Units`."""
        self._parameters = parameters
        self._start = start or StepStart()
        self._reading = threading.Lock()
        self._version: int | None = None
        self._queued: Queued = device.NOTHING

    @property
    def version(self) -> int | None:
        """The step at whose start the parameters are; ``None`` while they may change."""
        return self._version

    def open(self, version: int) -> None:
        """The parameters are those of the start of step ``version`` until :meth:`close`."""
        self._queued = device.current().queued(self._parameters())
        self._version = version

    def close(self) -> None:
        """The parameters may change afterwards; waits for the current piece."""
        # Before the lock: a reader that takes it again at once must find the window closed.
        self._version = None
        with self._reading:
            pass

    @contextlib.contextmanager
    def reading(self) -> Iterator[int | None]:
        """Keep the window open for one piece; yields ``None`` if it is closed.

        A device has then done what the main thread had queued when it opened the window, and what
        is read within the context has been read at its end.
        """
        with self._reading:
            version = self._version
            if version is None:
                yield None
                return
            with device.after(self._queued), self._start.reading():
                yield version

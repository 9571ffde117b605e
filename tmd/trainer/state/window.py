"""The time when this worker's parameters do not change: from the start of a step to its vote.

Meanwhile a background thread may copy them or compute their digest, piece by piece. The main thread
closes the window before the optimizer runs and waits at most for the current piece.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Window:
    """Opened and closed by the main thread; other threads read the parameters in it."""

    def __init__(self) -> None:
        self._reading = threading.Lock()
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The step at whose start the parameters are; ``None`` while they may change."""
        return self._version

    def open(self, version: int) -> None:
        """The parameters are those of the start of step ``version`` until :meth:`close`."""
        self._version = version

    def close(self) -> None:
        """The parameters may change afterwards; waits for the current piece."""
        # Before the lock: a reader that takes it again at once must find the window closed.
        self._version = None
        with self._reading:
            pass

    @contextlib.contextmanager
    def reading(self) -> Iterator[int | None]:
        """Keep the window open for one piece; yields ``None`` if it is closed."""
        with self._reading:
            yield self._version

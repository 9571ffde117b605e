"""When the parameters of this worker stand still: from the start of a step to its vote.

Within it a background thread may copy them or take their digest, piece by piece. The main thread
closes the window before the optimizer runs and waits for at most the piece in hand.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Window:
    """Opened and closed by the main thread, read through by others."""

    def __init__(self) -> None:
        self._reading = threading.Lock()
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The step at whose start the parameters stand; ``None`` while they may change."""
        return self._version

    def open(self, version: int) -> None:
        """The parameters are those of the start of step ``version`` until :meth:`close`."""
        self._version = version

    def close(self) -> None:
        """They may change from here on; waits for the piece in hand."""
        # First of all: a reader that takes the lock again at once must find it closed.
        self._version = None
        with self._reading:
            pass

    @contextlib.contextmanager
    def reading(self) -> Iterator[int | None]:
        """Hold the window open for one piece; ``None`` if it is closed."""
        with self._reading:
            yield self._version

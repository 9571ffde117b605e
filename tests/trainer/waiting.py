"""Waits for what another thread does."""

from __future__ import annotations

import threading
from collections.abc import Callable

PATIENCE_S = 20


def wait_for(there: Callable[[], bool]) -> None:
    """Raises TimeoutError: ``there()`` is not true in time."""
    ticks = threading.Event()
    for _ in range(1000):
        if there():
            return
        ticks.wait(PATIENCE_S / 1000)
    raise TimeoutError

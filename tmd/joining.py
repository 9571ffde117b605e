"""How a launcher knows that a script has called ``join()``: by a file that it leaves.

Not by the daemon, which may be away, and not by a pipe, which a script's own children would hold.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

VARIABLE = "TMD_JOINED"


def mark() -> None:
    """In the worker. Without a launcher nobody wants to know."""
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            Path(path).touch()


class Joining:
    """In the launcher: which of its workers have called ``join()``."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def variables(self, worker: str) -> dict[str, str]:
        """What ``worker`` needs for :func:`mark`."""
        return {VARIABLE: str(self._file(worker))}

    def has(self, worker: str) -> bool:
        return self._file(worker).exists()

    def _file(self, worker: str) -> Path:
        return self._folder / worker.replace("/", "_")

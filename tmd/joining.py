"""A file by which a launcher learns that a script has called ``join()``.

The daemon may be unreachable, and a script's own children would hold a pipe open.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "TMD_JOINED"


def mark() -> None:
    """Called in the worker; does nothing without a launcher."""
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            Path(path).touch()


class Joining:
    """The launcher's record of workers that have called ``join()``."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._joined: dict[str, float] = {}
        """Workers whose file was seen, which may since have been removed as an old temporary, and
        when it was made (wall clock)."""

    def variables(self, worker: str) -> dict[str, str]:
        """Environment of ``worker`` for :func:`mark`."""
        return {VARIABLE: str(self._file(worker))}

    def look(self, workers: Iterable[str]) -> None:
        """Record which of ``workers`` have called ``join()``."""
        for worker in workers:
            self.has(worker)

    def has(self, worker: str) -> bool:
        if worker not in self._joined:
            with contextlib.suppress(OSError):
                self._joined[worker] = self._file(worker).stat().st_mtime
        return worker in self._joined

    def seconds(self, worker: str) -> float | None:
        """Seconds since ``worker`` called ``join()``; ``None`` if it has not."""
        return time.time() - self._joined[worker] if self.has(worker) else None

    def forget(self, worker: str) -> None:
        """Forget a worker that has ended."""
        self._joined.pop(worker, None)

    def _file(self, worker: str) -> Path:
        return self._folder / worker.replace("/", "_")

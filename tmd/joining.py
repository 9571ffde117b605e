"""How a launcher knows that a script has called ``join()``: by a file that it leaves.

Not by the daemon, which may be away, and not by a pipe, which a script's own children would hold.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
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
        self._joined: set[str] = set()
        """Those whose file was seen. It may be cleaned up as an old temporary one."""

    def variables(self, worker: str) -> dict[str, str]:
        """What ``worker`` needs for :func:`mark`."""
        return {VARIABLE: str(self._file(worker))}

    def look(self, workers: Iterable[str]) -> None:
        """Remember which of ``workers`` have called ``join()`` by now."""
        for worker in workers:
            self.has(worker)

    def has(self, worker: str) -> bool:
        if worker not in self._joined and self._file(worker).exists():
            self._joined.add(worker)
        return worker in self._joined

    def forget(self, worker: str) -> None:
        """It has ended."""
        self._joined.discard(worker)

    def _file(self, worker: str) -> Path:
        return self._folder / worker.replace("/", "_")

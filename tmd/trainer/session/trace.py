"""One line per committed step, to compare two runs bit for bit."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

from tmd.core.values.model import WorkerStatus


class Trace:
    """Writes nothing."""

    def begun(self) -> None:
        """The present step begins."""

    def computed(self) -> None:
        """All of it is done that comes before the vote."""

    def write(self, current: Callable[[], WorkerStatus]) -> None:
        """Write down the step that was just committed. ``loss`` is exact (hexadecimal float)."""

    def undone(self, status: WorkerStatus) -> None:
        """Write down that the present step was spoilt and will be run again."""


class FileTrace(Trace):
    """Appends JSON lines to ``<folder>/<worker>.jsonl``; written through at every step.

    Raises:
        OSError: the folder cannot be made or the file not be opened.
    """

    def __init__(self, folder: Path, worker: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = worker.replace("/", "_")
        self._file = (folder / f"{name}.jsonl").open("a", buffering=1)
        self._began = self._computed = 0.0

    def begun(self) -> None:
        self._began, self._computed = time.time(), 0.0

    def computed(self) -> None:
        self._computed = time.time()

    def write(self, current: Callable[[], WorkerStatus]) -> None:
        status = current()
        line = {
            "step": status.step - 1,
            "rank": status.rank,
            "worker": status.worker,
            "epoch": status.epoch,
            "began": self._began,
            "computed": self._computed,
            "at": time.time(),
            "loss": None if status.loss is None else float(status.loss).hex(),
            "links_opened": status.links_opened,
            "rss_peak": status.rss_bytes,
        }
        self._file.write(json.dumps(line) + "\n")

    def undone(self, status: WorkerStatus) -> None:
        line = {
            "undone": status.step,
            "rank": status.rank,
            "epoch": status.epoch,
            # Whoever had come to its vote has waited there.
            "computed": self._computed or time.time(),
        }
        self._file.write(json.dumps(line) + "\n")


def peak_rss() -> int:
    """Peak resident size of this process in bytes.

    Not from /proc: writing that page out costs a millisecond, and this is asked in every step.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

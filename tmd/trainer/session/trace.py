"""One line per committed step, to compare two runs bit for bit."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from tmd.core.values.model import WorkerStatus
from tmd.core.values.reasons import os_reason

log = logging.getLogger("tmd.trainer")


class Trace:
    """Writes nothing."""

    def begun(self) -> None:
        """The current step begins."""

    def computed(self) -> None:
        """The current step has reached its vote."""

    def write(
        self, current: Callable[[], WorkerStatus], losses: Mapping[int, float | None]
    ) -> None:
        """Record the committed step, once for each rank of this worker; ``loss`` is exact
        (hexadecimal float)."""

    def undone(self, status: WorkerStatus) -> None:
        """Record that the current step was poisoned and will be repeated."""


class FileTrace(Trace):
    """Appends JSON lines to ``<folder>/<worker>.jsonl``, flushed at every step. If the file cannot
    be written, as on a full disk, the trace ends with a warning.

    Raises:
        OSError: the folder or the file cannot be created.
    """

    def __init__(self, folder: Path, worker: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = worker.replace("/", "_")
        self._file: TextIO | None = (folder / f"{name}.jsonl").open("a", buffering=1)
        self._began = self._computed = 0.0

    def begun(self) -> None:
        self._began, self._computed = time.time(), 0.0

    def computed(self) -> None:
        self._computed = time.time()

    def write(
        self, current: Callable[[], WorkerStatus], losses: Mapping[int, float | None]
    ) -> None:
        status = current()
        for rank, loss in losses.items():
            self._write(status, rank, loss)

    def _write(self, status: WorkerStatus, rank: int, loss: float | None) -> None:
        line = {
            "step": status.step - 1,
            "rank": rank,
            "worker": status.worker,
            "epoch": status.epoch,
            "began": self._began,
            "computed": self._computed,
            "at": time.time(),
            "loss": None if loss is None else loss.hex(),
            "links_opened": status.links_opened,
            "rss_peak": status.rss_bytes,
        }
        self._append(line)

    def undone(self, status: WorkerStatus) -> None:
        line = {
            "undone": status.step,
            "rank": status.rank,
            "epoch": status.epoch,
            "began": self._began,
            # A rank that had reached its vote has waited there.
            "computed": self._computed or time.time(),
        }
        self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.warning("the trace %s ends here: %s", self._file.name, os_reason(error))
            # What the file still buffers would fail again.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def peak_rss() -> int:
    """Peak resident size of this process in bytes.

    Not from /proc, where reading costs a millisecond, since this is called in every step.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

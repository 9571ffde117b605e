"""A small file that is replaced as a whole.

A thread writes it, so that a disk that hangs does not keep the daemon from sending heartbeats.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from tmd.core.values.reasons import in_words

PATIENCE_S = 1.0
HANGS = "the disk does not answer"


class ReplacedFile:
    """``path`` has the newest data that the disk has taken."""

    def __init__(self, path: Path, patience_s: float = PATIENCE_S) -> None:
        """``patience_s``: longest wait for the disk; after that the caller goes on without it."""
        self.path, self._patience_s = path, patience_s
        self._changing = threading.Lock()
        self._next: bytes | None = None
        self._thread: threading.Thread | None = None
        self._refused: bytes | None = None
        """The newest data, if they could not be written."""
        self._error = ""

    @property
    def problem(self) -> str:
        """Why the newest data are not on the disk; empty if they are."""
        return self._error if self._thread is None else HANGS

    def write(self, data: bytes) -> None:
        """Replace the file atomically. An error, such as a full disk, is in :attr:`problem`.

        If the disk hangs, ``data`` is written once it answers, unless there are newer ones then.
        """
        writing = self._begin(data)
        if writing is not None:
            writing.join(self._patience_s)
            if writing.is_alive():
                self._failed(HANGS)

    def write_again(self) -> None:
        """Try once more to write what the disk did not take, if there is anything. Does not wait
        for it."""
        with self._changing:
            data = None if self._thread is not None else self._refused
        if data is not None:
            self._begin(data)

    def _failed(self, why: str) -> None:
        """Data were not written, or not yet. May be called in any thread."""

    def _worked(self) -> None:
        """Data were written after others were not. May be called in any thread."""

    def _begin(self, data: bytes) -> threading.Thread | None:
        """The thread that writes ``data`` from now on; ``None`` if there is one already, which
        writes them next, or if none can be had: then they count as refused."""
        with self._changing:
            self._next = data
            if self._thread is not None:
                return None
            writing = threading.Thread(target=self._work, daemon=True)
            try:
                writing.start()
            except RuntimeError as error:
                self._refuse(data, in_words(error))
                self._next = None
                return None
            self._thread = writing
            return writing

    def _work(self) -> None:
        while True:
            with self._changing:
                data, self._next = self._next, None
                if data is None:
                    self._thread = None
                    return
            self._replace(data)

    def _replace(self, data: bytes) -> None:
        fresh, before = self.path.with_suffix(".new"), self._refused
        try:
            fresh.write_bytes(data)
            os.replace(fresh, self.path)
        except OSError as error:
            self._refuse(data, in_words(error))
            return
        self._refused, self._error = None, ""
        if before is not None:
            self._worked()

    def _refuse(self, data: bytes, why: str) -> None:
        before, self._refused, self._error = self._refused, data, why
        if before is None:
            self._failed(why)
